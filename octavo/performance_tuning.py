"""`PerformanceTuner`: what a model does on this machine, measured, and which options suit it best.

The same from Python as `octavo bench throughput`, `octavo tune` and `octavo doctor --url`, with an engine in
this process.

tuner = PerformanceTuner("smollm2")
print(tuner.run_benchmark(), tuner.analyze_bottlenecks())
"""

import statistics
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

import psutil

from octavo.base.cores import usable_cores
from octavo.base.errors import ConfigError, OctavoError
from octavo.bench.diagnosis import Diagnosis, diagnose
from octavo.bench.server_metrics import page_of
from octavo.bench.tune.search import Search, Trial
from octavo.bench.tune.space import default_space, without
from octavo.config.model import DEFAULT_MODEL
from octavo.frontend.outputs.request_output import RequestOutput
from octavo.llm import LLM
from octavo.messages.sampling import SamplingParams
from octavo.metrics.nvml import read_gpus

_EVERY_S = 0.1


class Benchmark(TypedDict):
    """What was measured while all requests ran at once."""

    throughput: float
    """New tokens per second, of all requests together."""
    latency: float
    """Seconds from the beginning to the end of a request, the mean."""
    gpu_util: float
    """Percent of the time in which the busiest GPU computed, the mean; 0 without a GPU."""
    memory_usage: float
    """Largest share of memory in use, by anybody: of the fullest GPU, else of the machine."""


class PerformanceTuner:
    """Measures one model; every measurement loads it anew and frees it."""

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        num_prompts: int = 16,
        prompt_tokens: int = 64,
        max_tokens: int = 32,
        **options: Any,
    ) -> None:
        """options: of the engine, as LLM takes them.

        num_prompts, prompt_tokens, max_tokens: the work of a measurement; its prompts have nothing in common
        """
        self.model, self.options = model, options
        self._num_prompts = num_prompts
        self._prompt_tokens = prompt_tokens
        self._params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        self._last: Benchmark | None = None
        self._diagnosis: Diagnosis | None = None

    def run_benchmark(self, **options: Any) -> Benchmark:
        """Measure, after a warm-up; `options` are added to the tuner's. Raises ConfigError."""
        with LLM(self.model, **{**self.options, **options}) as llm:
            llm.generate(self._prompts(llm, offset=1), self._params, use_tqdm=False)
            llm.reset_prefix_cache()
            before = page_of(llm.get_metrics())
            watch, began_s = _Watch(), time.monotonic()
            with watch:
                outputs = llm.generate(self._prompts(llm, offset=0), self._params, use_tqdm=False)
            took_s = time.monotonic() - began_s
            after = page_of(llm.get_metrics())
        if read_gpus():
            for page in (before, after):
                page.values["gpu_utilization"] = statistics.mean(watch.gpu_shares)
        self._diagnosis = diagnose([before, after], took_s)
        self._last = Benchmark(
            throughput=sum(len(output.outputs[0].token_ids) for output in outputs) / took_s,
            latency=statistics.mean(map(_seconds, outputs)),
            gpu_util=statistics.mean(watch.gpu_shares) * 100,
            memory_usage=max(watch.memory_shares),
        )
        return self._last

    def optimize_config(
        self,
        candidates: Iterable[Mapping[str, Any]] | None = None,
        *,
        time_budget_s: float = 600.0,
        allow_rounding: bool = False,
    ) -> dict[str, Any]:
        """The options with the highest throughput among those measured; what cannot start is left out.

        candidates: options to be tried; None: the search of `octavo tune`, for `time_budget_s` seconds,
            allow_rounding as there
        Raises ConfigError when none can start.
        """
        if candidates is None:
            axes = default_space(num_gpus=len(read_gpus()), num_cores=usable_cores(), rounds=allow_rounding)
            search = Search(without(axes, self.options), self._measure, budget_s=time_budget_s)
            return self.options | search.run().options
        results: list[tuple[float, dict[str, Any]]] = []
        failure: ConfigError | None = None
        for options in candidates:
            try:
                results.append((self.run_benchmark(**options)["throughput"], dict(options)))
            except ConfigError as error:
                failure = error
        if not results:
            raise failure or ConfigError("There is nothing to try: candidates is empty.")
        return self.options | max(results, key=lambda result: result[0])[1]

    def _measure(self, options: dict[str, Any]) -> Trial:
        began_s = time.monotonic()
        try:
            score, error = self.run_benchmark(**options)["throughput"], ""
        except OctavoError as failure:
            score, error = None, str(failure)
        return Trial(options, score, time.monotonic() - began_s, error=error)

    def analyze_bottlenecks(self, benchmark: Benchmark | None = None) -> list[str]:
        """What the figures of a measurement, by default the last one, point to; [] when to nothing."""
        measured = benchmark or self._last or self.run_benchmark()
        found = [self._diagnosis.text] if self._diagnosis and not benchmark else []
        if read_gpus() and measured["gpu_util"] < 80:
            found.append("The GPU waits: more requests at once (max_num_seqs), or larger steps.")
        if measured["memory_usage"] > 0.9:
            found.append("Memory is nearly full: lower gpu_memory_utilization, or keep keys in 8 bits.")
        if measured["latency"] > 0.5:
            found.append("Requests take more than 0.5 s: fewer at once (max_num_seqs), or fewer tokens each.")
        return found

    def _prompts(self, llm: LLM, offset: int) -> list[list[int]]:
        size = llm.llm_engine.config.checkpoint.vocab_size
        numbers = range(offset, 2 * self._num_prompts, 2)
        return [[(number * 31 + n * 7) % size for n in range(self._prompt_tokens)] for number in numbers]


class _Watch:
    """Looks at GPUs and memory from a thread, at least once."""

    def __init__(self) -> None:
        self.gpu_shares: list[float] = []
        self.memory_shares: list[float] = []
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        while not self.gpu_shares or not self._ends.wait(_EVERY_S):
            gpus = read_gpus()
            self.gpu_shares.append(max((gpu.utilization for gpu in gpus), default=0.0))
            used = [gpu.used_bytes / gpu.total_bytes for gpu in gpus]
            self.memory_shares.append(max(used, default=psutil.virtual_memory().percent / 100))


def _seconds(output: RequestOutput) -> float:
    assert output.metrics is not None
    return output.metrics.last_token_ts - output.metrics.arrival_time
