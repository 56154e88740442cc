"""What holds a server back, from its own figures: requests that wait, KV blocks, memory bandwidth, the host.

Used by `octavo doctor --url`, which watches a server for some seconds, and by the tuner, which looks at each
measurement. Figures that a server does not show are left out of the judgement.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Literal, NamedTuple

import psutil

from octavo.bench.client import Target
from octavo.bench.server_metrics import PATH as METRICS
from octavo.bench.server_metrics import Page, parse_page

Bound = Literal["idle", "kv", "queue", "host", "bandwidth", "compute"]
_FULL_CACHE = 0.9
_FULL_BATCH = 0.9
_BUSY = 0.7
"""Share of its time that a device computes, below which the host keeps it waiting."""
_FEW_TOKENS = {"cpu": 32, "gpu": 256}
"""Tokens in a step, below which reading the weights takes longer than multiplying with them."""
_TEXTS: Mapping[Bound, tuple[str, str]] = {
    "idle": ("The server is idle.", "Measure while it has work: `octavo bench serve` makes some."),
    "kv": (
        "KV-bound: the cache has no room for more requests.",
        "Keep keys in 8 bits (--kv-cache-dtype), give the cache more (--gpu-memory-utilization, "
        "--kv-cache-memory-bytes), lower --max-model-len, or add --swap-space.",
    ),
    "queue": (
        "Queue-bound: every place in the batch is taken while requests wait, and the cache has room.",
        "Raise --max-num-seqs as far as latency allows, or add a server.",
    ),
    "host": (
        "Host-bound: the device waits for the host between steps.",
        "Raise --stream-interval or --api-server-count, keep CUDA graphs and --steps-in-flight "
        "2 on, and leave "
        "cores free for the engine.",
    ),
    "bandwidth": (
        "Bandwidth-bound: steps have few tokens, and each reads all weights.",
        "More requests at once cost little. For one stream: fewer bytes (--quantization, "
        "--kv-cache-dtype) or "
        "speculation (--speculative-config).",
    ),
    "compute": (
        "Compute-bound: steps have many tokens.",
        "Lower precision (--activations int8, --quantization), more devices (-tp, -dp), or a smaller "
        "--max-num-batched-tokens if streams stutter behind long prompts.",
    ),
}


class Figure(NamedTuple):
    """A number that the judgement rests on."""

    name: str
    value: float
    unit: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.value:.3g}{self.unit and ' ' + self.unit}"


@dataclass(frozen=True)
class Diagnosis:
    """What holds a server back, why that is thought, and what to do."""

    bound: Bound
    figures: tuple[Figure, ...]

    @property
    def text(self) -> str:
        """One sentence."""
        return _TEXTS[self.bound][0]

    @property
    def advice(self) -> str:
        """What to change."""
        return _TEXTS[self.bound][1]

    def lines(self) -> list[str]:
        """Sentence, figures and advice, for a terminal."""
        return [self.text, "    " + ", ".join(map(str, self.figures)), f"    → {self.advice}"]


def idle_core_s() -> float:
    """Return the seconds that cores of this machine have been idle, all together, since it started."""
    times = psutil.cpu_times()
    return float(times.idle + getattr(times, "iowait", 0.0))


def diagnose(pages: Sequence[Page], seconds: float, idle_cores: float | None = None) -> Diagnosis:
    """Judge a server by pages of its metrics, the first and the last `seconds` apart.

    idle_cores: of its machine meanwhile, if that is known; without, a server on CPUs is never called
    host-bound
    """
    first, last = pages[0], pages[-1]
    running, waiting, cache = (
        mean(page.get(name) for page in pages)
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    )
    places = last.get("max_num_requests_running")
    steps = last.since("iteration_tokens_total_count", first)
    per_step = last.mean("iteration_tokens_total", first) or 0.0
    queue_s = last.mean("request_queue_time_seconds", first)
    is_gpu = "gpu_utilization" in last.values
    gpus = max(1, len(last.by_label.get("gpu_utilization", ())))
    device = mean(page.get("gpu_utilization") for page in pages) / gpus
    cores = max(page.get("cpu_utilization") for page in pages)
    busy = device if is_gpu else 1.0 if idle_cores is None else cores / max(cores + idle_cores, 1e-6)
    preemptions = last.since("num_preemptions", first)
    figures = [
        Figure("running", running),
        Figure("waiting", waiting),
        Figure("KV cache", 100 * cache, "%"),
        Figure("preemptions", preemptions),
        Figure("steps", steps / seconds, "/s"),
        Figure("tokens per step", per_step),
        Figure("output", last.since("generation_tokens", first) / seconds, "tok/s"),
        *([Figure("queue", 1000 * queue_s, "ms")] if queue_s is not None else []),
        *([Figure("GPU busy", 100 * device, "%")] if is_gpu else []),
        *([Figure("busy cores", cores)] if cores else []),
        *([Figure("idle cores", idle_cores)] if idle_cores is not None else []),
    ]
    bound: Bound = "bandwidth" if per_step < _FEW_TOKENS["gpu" if is_gpu else "cpu"] else "compute"
    if not steps and running < 0.5:
        bound = "idle"
    elif preemptions or (cache >= _FULL_CACHE and waiting >= 0.5):
        bound = "kv"
    elif waiting >= 0.5 and places and running >= _FULL_BATCH * places:
        bound = "queue"
    elif busy < _BUSY:
        bound = "host"
    return Diagnosis(bound, tuple(figures))


async def watch(target: Target, seconds: float, every_s: float = 0.5) -> tuple[list[Page], float]:
    """Return pages of a server's metrics over a time, and how long that was. Raises OctavoError."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    pages = [parse_page(await target.get(METRICS))]
    while (left := start + seconds - loop.time()) > 0 or len(pages) < 2:
        await asyncio.sleep(max(0.0, min(every_s, left)))
        pages.append(parse_page(await target.get(METRICS)))
    return pages, loop.time() - start
