"""`bench serve`: put a load on an OpenAI-compatible server and measure what comes back.

Flags, definitions and fields of the result are `vllm bench serve`'s, so that both read each other's files.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import numpy as np
import tokenizers
from tokenizers.models import WordLevel

from octavo.base import env
from octavo.base.errors import ConfigError, OctavoError
from octavo.base.hub import locate
from octavo.bench import figures
from octavo.bench.arrivals import RampUp, check_ramp_up, send_times
from octavo.bench.backends import BACKENDS
from octavo.bench.client import Target, Timing
from octavo.bench.data_options import DataOptions
from octavo.bench.generated import Sample
from octavo.bench.load import Load, Run, run_load
from octavo.bench.load_options import LoadOptions, ReportOptions
from octavo.bench.samples import GENERATED, load_samples
from octavo.bench.server_metrics import speculation
from octavo.frontend.text.loader import load_tokenizer
from octavo.frontend.text.tokenizer import Tokenizer

_TRACE = "timed_trace"
_FEW_WORDS = 256
_ALWAYS_WHOLE = ("random", _TRACE)
"""Data sets whose answers have the length that was asked for."""


@dataclass(frozen=True, kw_only=True)
class ServeBench:
    """A benchmark of a server; made of flags, or in a program."""

    data: DataOptions = field(default_factory=DataOptions)
    load: LoadOptions = field(default_factory=LoadOptions)
    report: ReportOptions = field(default_factory=ReportOptions)
    body: Mapping[str, Any] = field(default_factory=dict)
    """Fields of every request, sampling parameters among them."""

    def check(self) -> RampUp | None:
        """Return the ramp of rates, if one is asked for. Raises ConfigError for options that cannot be."""
        load, data = self.load, self.data
        figures.parse_goodput(self.report.goodput)
        self.percentiles()
        unknown = sorted(set(self.metrics()) - set(figures.METRICS))
        if unknown:
            raise ConfigError(f"--percentile-metrics {unknown[0]!r} is none of {', '.join(figures.METRICS)}.")
        if load.max_concurrency < 0:
            raise ConfigError("--max-concurrency must be greater than 0.")
        if not (load.request_rate > 0 and load.burstiness > 0):
            raise ConfigError("--request-rate and --burstiness must be greater than 0.")
        if load.skip_tokenizer_init and data.dataset_name in GENERATED:
            raise ConfigError(f"--dataset-name {data.dataset_name} makes texts and needs a tokenizer.")
        if data.dataset_name == _TRACE and not BACKENDS[load.backend].takes_ids:
            raise ConfigError(
                "timed_trace has prompts of token ids and requires a completions backend "
                "('vllm' or 'openai')."
            )
        is_pairs = data.dataset_name == "random-rerank"
        if is_pairs != (BACKENDS[load.backend].num_queries > 0):
            raise ConfigError("The backend vllm-rerank and the data set random-rerank go together.")
        for pair in (*load.header, *self.report.metadata):
            if "=" not in pair:
                raise ConfigError(
                    f"Invalid header or metadata format: {pair!r}. Please use KEY=VALUE format."
                )
        return check_ramp_up(
            load.ramp_up_strategy, load.ramp_up_start_rps, load.ramp_up_end_rps, load.request_rate
        )

    def metrics(self) -> list[str]:
        """Return the metrics to report."""
        streams = BACKENDS[self.load.backend].streams
        return (self.report.percentile_metrics or ("ttft,tpot,itl" if streams else "e2el")).split(",")

    def percentiles(self) -> list[float]:
        """Return the percentiles to report. Raises ConfigError."""
        try:
            shares = [float(share) for share in self.report.metric_percentiles.split(",")]
        except ValueError:
            shares = [-1.0]
        if not all(0 <= share <= 100 for share in shares):
            raise ConfigError(
                f"--metric-percentiles {self.report.metric_percentiles} must be numbers from 0 "
                "to 100, as 50,99."
            )
        return shares


def run(bench: ServeBench) -> dict[str, Any]:
    """Run the benchmark; its result, with every request's figures. Raises OctavoError."""
    return asyncio.run(measure(bench))


async def measure(bench: ServeBench) -> dict[str, Any]:
    """As `run`, on a loop that runs."""
    ramp, load = bench.check(), bench.load
    base_url = load.base_url or f"http://{load.host}:{load.port}"
    headers = dict(pair.split("=", 1) for pair in load.header)
    if (key := env.openai_api_key()) and "Authorization" not in headers:
        headers["Authorization"] = f"Bearer {key}"
    target = Target(
        base_url, BACKENDS[load.backend], endpoint=load.endpoint, headers=headers, verify=not load.insecure
    )
    async with target:
        name, source = await _model(target, load)
        tokenizer = _tokenizer(load, source)
        samples = await asyncio.to_thread(load_samples, bench.data, tokenizer)
        is_whole = BACKENDS[load.backend].streams and bench.data.dataset_name in _ALWAYS_WHOLE
        body = ({"ignore_eos": True} if is_whole else {}) | dict(bench.body)
        if load.ready_check_timeout_sec > 0:
            await target.wait_until_ready(samples[0], name, body, load.ready_check_timeout_sec)
        plan = Load(
            samples=samples,
            send_times=_times(bench, samples, ramp),
            models=_models(load, name, len(samples), bench.data.seed),
            extra=body,
            max_concurrency=load.max_concurrency,
            num_warmups=load.num_warmups,
            probe_rate=load.probe_request_rate,
            show_progress=not load.disable_tqdm,
        )
        if load.profile:
            await target.post("/start_profile")
        measured = await run_load(target, plan)
        if load.profile:
            await target.post("/stop_profile")
    return _head(bench, source, ramp) | _result(
        bench, measured, None if load.skip_tokenizer_init else tokenizer
    )


def _times(bench: ServeBench, samples: Sequence[Sample], ramp: RampUp | None) -> list[float]:
    load = bench.load
    if load.self_timed and bench.data.dataset_name == _TRACE:
        return [sample.timestamp or 0.0 for sample in samples]
    draw = np.random.default_rng(bench.data.seed)
    return send_times(len(samples), load.request_rate, load.burstiness, draw, ramp)


def _models(load: LoadOptions, name: str, count: int, seed: int) -> list[str]:
    if not load.lora_modules:
        return [name] * count
    draw = np.random.default_rng(seed)
    is_random = load.lora_assignment == "random"
    places = draw.integers(0, len(load.lora_modules), size=count) if is_random else range(count)
    return [load.lora_modules[place % len(load.lora_modules)] for place in places]


async def _model(target: Target, load: LoadOptions) -> tuple[str, str]:
    """Its name in requests, and where its tokenizer is; the server is asked anyhow, to see if it is there."""
    if not load.model:
        return await target.first_model()
    await target.get("/v1/models")
    return load.served_model_name or load.model, load.model


def _tokenizer(load: LoadOptions, source: str) -> Tokenizer:
    """The tokenizer that counts; with skip_tokenizer_init one to which every text is one token."""
    if load.skip_tokenizer_init:
        words = {str(number): number for number in range(_FEW_WORDS)}
        return Tokenizer(tokenizers.Tokenizer(WordLevel(words, unk_token="0")))
    try:
        return load_tokenizer(locate(load.tokenizer or source))
    except ConfigError as error:
        raise ConfigError(f"{error} Name the model's tokenizer with --tokenizer.") from error


def _head(bench: ServeBench, model: str, ramp: RampUp | None) -> dict[str, Any]:
    load, rate = bench.load, bench.load.request_rate
    result: dict[str, Any] = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": load.backend,
        "backend": load.backend,
        "label": bench.report.label or None,
        "model_id": model,
        "tokenizer_id": None if load.skip_tokenizer_init else load.tokenizer or model,
        "num_prompts": bench.data.num_prompts,
        **dict(pair.split("=", 1) for pair in bench.report.metadata),
        "request_rate": "inf" if math.isinf(rate) else rate,
        "burstiness": load.burstiness,
        "max_concurrency": load.max_concurrency or None,
    }
    if ramp:
        result |= {f"ramp_up_{name}": value for name, value in ramp._asdict().items()}
    return result


def _result(bench: ServeBench, run: Run, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The figures of a run. Raises OctavoError when no request succeeded."""
    if not any(timing.success for timing in run.timings):
        errors = [timing.error for timing in run.timings]
        raise OctavoError(f"All {len(errors)} requests failed; the first: {errors[0]}")
    if BACKENDS[bench.load.backend].streams:
        timings = [_counted(timing, tokenizer) for timing in run.timings]
        limits = figures.parse_goodput(bench.report.goodput)
        result = figures.generation_figures(timings, run.duration_s, limits)
    else:
        timings, result = run.timings, figures.pooling_figures(run.timings, run.duration_s)
    result |= figures.probe_figures(run.probes) | dict(speculation(run.before, run.after))
    values = figures.latencies(timings)
    for name in bench.metrics():
        if name.endswith("client_queue") and math.isinf(bench.load.request_rate):
            continue
        if "client_queue" in name and not bench.load.max_concurrency:
            continue
        result |= figures.summary(name, values[name], bench.percentiles())
    return result


def _counted(timing: Timing, tokenizer: Tokenizer | None) -> Timing:
    """With the number of tokens, counted here if the server did not say."""
    if timing.output_tokens or not timing.success:
        return timing
    count = len(tokenizer.encode(timing.generated_text, add_special_tokens=False)) if tokenizer else 1
    return replace(timing, output_tokens=count or 1)
