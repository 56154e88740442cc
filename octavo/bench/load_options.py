"""`LoadOptions`, `SamplingOptions`, `ReportOptions`: the flags of `bench serve` besides the data set's."""

from dataclasses import dataclass

from octavo.bench.backends import BACKENDS
from octavo.config.option import option


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Whom it asks, and how fast."""

    backend: str = option("openai", "How to ask.", choices=tuple(BACKENDS))
    base_url: str = option("", "The server, as http://127.0.0.1:8000, instead of --host and --port.")
    host: str = option("127.0.0.1", "Its address.")
    port: int = option(8000, "Its port.")
    endpoint: str = option("", "Path of the request; by default the backend's.")
    header: list[str] = option([], "KEY=VALUE: headers of every request.")
    insecure: bool = option(False, "Do not check the server's certificate.")
    model: str = option("", "Model to ask for; by default the server's first.")
    served_model_name: str = option("", "Its name in requests, if that is another.")
    tokenizer: str = option("", "Folder or name of the tokenizer, if it is not the model's.")
    skip_tokenizer_init: bool = option(False, "Use no tokenizer: prompts of files as they are, lengths as 1.")
    request_rate: float = option(float("inf"), "Requests per second; inf = all at once.")
    burstiness: float = option(1.0, "Shape of the gamma distribution of intervals; 1 = Poisson, inf = even.")
    ramp_up_strategy: str = option("", "The rate grows so.", choices=("linear", "exponential"))
    ramp_up_start_rps: float = option(-1.0, "From this many requests per second.")
    ramp_up_end_rps: float = option(-1.0, "To this many.")
    self_timed: bool = option(True, "timed_trace: send at the trace's times, not at --request-rate.")
    max_concurrency: int = option(0, "Most requests at once; 0 = no bound.")
    num_warmups: int = option(0, "Requests before the clock starts.")
    ready_check_timeout_sec: int = option(0, "Wait so long for a first answer; 0 = do not ask for one.")
    probe_request_rate: float = option(0.0, "Requests of one token per second beside the load, told apart.")
    lora_modules: list[str] = option([], "Adapters, of which each request asks for one.")
    lora_assignment: str = option("random", "Which one.", choices=("random", "round-robin"))
    profile: bool = option(False, "Have the server record a profile meanwhile.")
    disable_tqdm: bool = option(False, "No progress bar.")


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Fields of every request; what is not given is the server's choice."""

    temperature: float = option(0.0, "0 = greedy.")
    top_p: float = option(1.0, "Keep the most likely tokens whose probabilities reach this sum.")
    top_k: int = option(0, "Keep this many.")
    min_p: float = option(0.0, "Keep tokens this many times as likely as the most likely one.")
    frequency_penalty: float = option(0.0, "Subtracted per occurrence.")
    presence_penalty: float = option(0.0, "Subtracted once.")
    repetition_penalty: float = option(1.0, "Above 1: tokens that were there become less likely.")
    logprobs: int = option(0, "Logprobs per token.")
    ignore_eos: bool = option(False, "Always generate all tokens; on with random prompts and traces.")
    extra_body: dict[str, object] = option({}, "More fields of the request.")


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """What is reported, and where it is kept."""

    goodput: list[str] = option([], "Limits in ms, as ttft:200 tpot:50 e2el:9000: requests within are good.")
    percentile_metrics: str = option("", "Metrics to report: ttft,tpot,itl,e2el (default: the first three).")
    metric_percentiles: str = option("99", "Their percentiles, as 50,90,99.")
    label: str = option("", "Beginning of the file's name; by default the backend.")
    metadata: list[str] = option([], "KEY=VALUE: more fields of the result.")
    save_result: bool = option(False, "Write the result as JSON.")
    save_detailed: bool = option(False, "With what every request did.")
    append_result: bool = option(False, "Add it to the file as a line.")
    result_dir: str = option("", "Folder of the file.")
    result_filename: str = option("", "Its name.")
    plot: str = option("", "Draw tokens per second, percentiles and requests to this file (PNG, SVG, PDF).")
    plot_timeline: bool = option(False, "Draw when each request waited, began and ended, beside the result.")
    plot_dataset_stats: bool = option(False, "Draw the lengths of inputs and outputs, beside the result.")
