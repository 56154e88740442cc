"""`PooledModel`: one model of several: its state, its engine while it has one, and the requests that use it.

Driven by `pool`, which alone decides when it comes and goes.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, get_args

from octavo.base.errors import OctavoError
from octavo.base.log import get_logger
from octavo.config import EngineConfig, resolve
from octavo.config.served_models import ModelEntry
from octavo.frontend.async_engine import AsyncLLM, OnCrash
from octavo.frontend.observe.engine_metrics import EngineMetrics
from octavo.metrics import Metric
from octavo.metrics.collection import Collection
from octavo.serving.engines import State
from octavo.serving.errors import HTTPError, http_error, message_of
from octavo.serving.model_pool.footprint import Footprint, measure
from octavo.serving.model_pool.residency import Departure, Limits, Resident
from octavo.serving.queue_bound import bounded

logger = get_logger(__name__)
_RETRY_S = 30.0
"""After a failed load: requests learn of it at once, without another try."""
_GRACE_S = 5.0


class PooledModel:
    """Used from one event loop."""

    def __init__(self, entry: ModelEntry, on_crash: OnCrash, on_change: Callable[[str, str], None]) -> None:
        """on_change: called with the name and each new state"""
        self.entry = entry
        self.name = entry.name
        self.created = int(time.time())
        self.state: State
        self.engine: AsyncLLM | None = None
        self.config: EngineConfig | None = None
        """Known from the first load on."""
        self.footprint: Footprint | None = None
        self.board = Collection(model_name=entry.name, engine="0")
        """Metrics of its comings and goings."""
        self.metrics: EngineMetrics | None = None
        """Of what its engines do, of one after the other."""
        self.fault = ""
        """Why it could not be loaded, as requests are told."""
        self.num_users = 0
        """Requests under way."""
        self.waiters: deque[asyncio.Future[None]] = deque()
        """Requests that wait for it."""
        self.departure: Departure | None = None
        """It is about to give way: requests wait until it is back."""
        self.is_recalled = False
        """It need not give way any more if it still has requests."""
        self.occupies: Literal["", "asleep", "awake"] = ""
        """What it takes of the memory, or is about to take."""
        self.keep_s: float | None = None
        """How long it stays after its last request, as that asked for; None = as its options say."""
        self.last_used_s = time.monotonic()
        self._retry_at_s = 0.0
        self._on_crash: OnCrash = on_crash
        self._on_change = on_change
        self._watch: asyncio.Task[None] | None = None
        self._become("unloaded")

    @property
    def is_open(self) -> bool:
        """Whether requests may begin now."""
        return self.state == "loaded" and self.departure is None

    @property
    def is_idle(self) -> bool:
        """Whether nobody uses it or waits for it."""
        return not self.num_users and not self.waiters

    def resident(self) -> Resident:
        """Return it as the arithmetic of `residency` sees it."""
        assert self.footprint is not None
        is_awake, is_busy = self.occupies == "awake", self.num_users > 0
        return Resident(self.name, self.footprint, is_awake, is_busy, last_used_s=self.last_used_s)

    def check(self) -> None:
        """Raise HTTPError when the last load has failed and another try is not due yet."""
        if self.fault and time.monotonic() < self._retry_at_s:
            raise self._refusal()

    def forgive(self) -> None:
        """Let the next request try to load it, whatever happened before."""
        self._retry_at_s = 0.0

    def expires_in_s(self) -> float:
        """Return the seconds until it is unloaded if nobody asks for it; inf: never."""
        keep_s = self.entry.ttl_s or float("inf") if self.keep_s is None else self.keep_s
        return self.last_used_s + keep_s - time.monotonic()

    async def prepare(self, limits: Limits) -> None:
        """Find out what it is and what it takes, once. Raises ConfigError."""
        if self.footprint is not None:
            return
        config = bounded(await asyncio.to_thread(resolve, self.entry.args))
        footprint = await measure(config, limits.host_bytes, limits.gpu_bytes)
        cache = config.cache
        if footprint.cache_bytes and not cache.num_gpu_blocks_override and not cache.kv_cache_memory_bytes:
            # as planned, however much is free when it is loaded
            cache = replace(cache, kv_cache_memory_bytes=footprint.cache_bytes)
        self.config, self.footprint = replace(config, cache=cache), footprint
        self.metrics = EngineMetrics(self.config)

    async def open(self) -> None:
        """Load or wake it. Raises ConfigError, EngineDead; then it has no engine."""
        began_s, was_asleep = time.monotonic(), self.state == "sleeping"
        self.occupies = "awake"
        if not was_asleep:
            self._become("loading")
        try:
            await (self._wake() if was_asleep else self._load())
        except BaseException:
            await self.unload()
            raise
        self.fault = ""
        self.last_used_s = time.monotonic()
        self._become("loaded")
        self.board.counter("model_loads", kind="wake" if was_asleep else "load").add()
        verb = "awake" if was_asleep else "loaded"
        logger.info("The model %s is %s after %.2f s.", self.name, verb, self.last_used_s - began_s)

    async def sleep(self) -> None:
        """Give up its cache, and on a GPU its weights; it is awake again in a moment."""
        assert self.engine is not None
        await self.engine.sleep(level=1)
        self.occupies = "asleep"
        self._become("sleeping")

    async def unload(self, grace_s: float = _GRACE_S) -> None:
        """End its engine, if it has one."""
        engine, self.engine = self.engine, None
        if self._watch is not None:
            self._watch.cancel()
        try:
            if engine is not None:
                await engine.shutdown(timeout=0, grace_s=grace_s)
        finally:
            self.occupies = ""
            self._become("unloaded")

    def fail(self, error: Exception) -> None:
        """It could not be loaded: tell those who wait, and those who come in the next seconds."""
        told = http_error(error)
        text = message_of(told) if isinstance(error, OctavoError) else "the log has the details"
        self.fault = f"The model {self.name!r} could not be loaded. {text}"
        self._retry_at_s = time.monotonic() + _RETRY_S
        logger.error("The model %s could not be loaded: %s", self.name, error)
        self.board.counter("model_load_failures").add()
        self._become("failed")
        self.refuse(self._refusal)

    def refuse(self, make_error: Callable[[], OctavoError]) -> None:
        """End the waiting of all who wait."""
        while self.waiters:
            waiter = self.waiters.popleft()
            if not waiter.done():
                waiter.set_exception(make_error())

    def snapshot(self) -> list[Metric]:
        """Return copies of its metrics."""
        return [*self.board.snapshot(), *(self.metrics.snapshot() if self.metrics is not None else ())]

    def admit(self) -> None:
        """Let everybody in who waits."""
        while self.waiters:
            waiter = self.waiters.popleft()
            if not waiter.done():
                self.num_users += 1
                waiter.set_result(None)

    def _refusal(self) -> HTTPError:
        return HTTPError(503, self.fault, "model", headers={"Retry-After": str(round(_RETRY_S))})

    async def _load(self) -> None:
        assert self.config is not None and self.metrics is not None
        self.metrics.note_new_core()
        make = lambda: AsyncLLM(self.config, on_crash=self._on_crash, metrics=self.metrics)  # noqa: E731
        self.engine = await asyncio.to_thread(make)
        await self.engine.start()
        self._watch = asyncio.create_task(self._notice_death(self.engine))

    async def _wake(self) -> None:
        assert self.engine is not None
        await self.engine.wake_up()

    async def _notice_death(self, engine: AsyncLLM) -> None:
        """Task: an engine that is gone for good is no engine; the next request starts another one."""
        error = await engine.core.wait_until_dead()
        logger.error("The model %s is unloaded: %s", self.name, error)
        self.engine, self._watch = None, None
        await engine.shutdown(timeout=0)
        self.occupies = ""
        self.fail(error)

    def _become(self, state: State) -> None:
        self.state = state
        for known in get_args(State):
            self.board.gauge("model_state", state=known).set(float(known == state))
        self._on_change(self.name, state)
