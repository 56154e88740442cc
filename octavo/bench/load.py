"""`run_load`: the requests of a benchmark on a server, each at its time; nothing waits for an answer."""

import asyncio
import contextlib
import gc
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from octavo.bench.client import Target, Timing
from octavo.bench.generated import Sample
from octavo.bench.server_metrics import Page, read_page


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is sent, when, and how much at once."""

    samples: Sequence[Sample]
    send_times: Sequence[float]
    """Seconds after the start, ascending; one per sample."""
    models: Sequence[str]
    """The model of each sample."""
    extra: Mapping[str, Any]
    """Fields of every request's body."""
    max_concurrency: int = 0
    """Most requests at once; 0 = no bound."""
    num_warmups: int = 0
    probe_rate: float = 0.0
    """Requests per second of one token, beside the load and without its bound."""
    show_progress: bool = False


@dataclass
class Run:
    """What was measured."""

    timings: list[Timing]
    duration_s: float
    before: Page
    after: Page
    """The server's own figures around the run."""
    probes: list[Timing] = field(default_factory=list)


async def run_load(target: Target, load: Load) -> Run:
    """Warm up, send everything at its time, and wait for the last answer."""
    with _progress(load.num_warmups, "warm-up", load.show_progress) as done:
        first = load.samples[0]
        ask = _Bounded(target, load, done)
        await asyncio.gather(*(ask(first, load.models[0]) for _ in range(load.num_warmups)))
    before = await read_page(target)
    is_over = asyncio.Event()
    prober = asyncio.create_task(_probe(target, load, is_over)) if load.probe_rate else None
    with _progress(len(load.samples), "requests", load.show_progress) as done, _no_garbage_collection():
        start = time.perf_counter()
        timings = await _send_all(_Bounded(target, load, done), load, start)
        duration = time.perf_counter() - start
    is_over.set()
    probes = await prober if prober else []
    return Run(timings, duration, before, await read_page(target), probes)


class _Bounded:
    """Sends a request when fewer than `max_concurrency` are open."""

    def __init__(self, target: Target, load: Load, done: Callable[[], object]) -> None:
        self._target, self._extra, self._done = target, load.extra, done
        self._free = (
            asyncio.Semaphore(load.max_concurrency) if load.max_concurrency else contextlib.nullcontext()
        )

    async def __call__(self, sample: Sample, model: str) -> Timing:
        arrival = time.perf_counter()
        async with self._free:
            timing = await self._target.ask(sample, model, self._extra)
        timing.client_queue_time = timing.start_time - arrival
        self._done()
        return timing


async def _send_all(
    ask: Callable[[Sample, str], Awaitable[Timing]], load: Load, start: float
) -> list[Timing]:
    tasks = []
    for sample, model, at in zip(load.samples, load.models, load.send_times, strict=True):
        if (wait := start + at - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.ensure_future(ask(sample, model)))
    return await asyncio.gather(*tasks)


async def _probe(target: Target, load: Load, is_over: asyncio.Event) -> list[Timing]:
    """Return the probes; the one that is under way at the end is waited for, as vLLM does."""
    probes = []
    while not is_over.is_set():
        probes.append(await target.ask(Sample("Hi", 1, 1), load.models[0], load.extra))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(is_over.wait(), 1 / load.probe_rate)
    return probes


@contextlib.contextmanager
def _progress(total: int, what: str, is_shown: bool) -> Iterator[Callable[[], object]]:
    with tqdm(total=total, desc=what, disable=not is_shown or not total) as bar:
        yield bar.update


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Pauses of the client would look like pauses of the server."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
