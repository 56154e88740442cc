"""One worker in the core's own process: a step is a plain call, and reading what it brought another."""

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from octavo.base import env
from octavo.base.bytecode import kept_bytecode
from octavo.base.registry import load_object
from octavo.config.engine import EngineConfig
from octavo.engine.executor import WORKER
from octavo.engine.executor.interface import Executor
from octavo.messages.kv import CachePlan, ModelReady
from octavo.messages.request import RequestSpec
from octavo.messages.step import ModelRunnerOutput, SchedulerOutput, TokenMasks


class InprocExecutor(Executor):
    """Runs the class named `worker`; a future waits for the device when its result is asked for."""

    def __init__(self, worker: str = WORKER, rank: int = 0, init_method: str = "") -> None:
        """init_method: where other ranks are met, if there are any."""
        self._worker_class = worker
        self._rank = rank
        self._init_method = init_method
        self._worker: Any = None
        self._last: _Reading | None = None

    def start(self, config: EngineConfig) -> ModelReady:
        with _no_collection(), kept_bytecode():
            worker = load_worker(self._worker_class, config.parallel.device)
            if not gc.get_freeze_count():
                gc.freeze()  # what was imported stays: a look through all of it would stop steps for 0.1 s
            self._worker = worker(config, self._rank, self._init_method)
            ready: ModelReady = self._worker.load()
        return ready

    def allocate(self, plan: CachePlan) -> None:
        self._worker.allocate(plan)

    def execute(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]:
        self._last = _Reading(self._worker, step)
        return self._last

    def sample(self, masks: TokenMasks) -> None:
        assert self._last is not None, "there is no step to sample"
        self._last.sample(self._worker, masks)

    def takes_time(self, spec: RequestSpec) -> bool:
        return bool(self._worker.takes_time(spec))

    def prepare(self, spec: RequestSpec) -> None:
        self._worker.prepare(spec)

    def use_pause(self) -> bool:
        return any(self.call("use_pause", {}))

    def call(self, verb: str, arguments: dict[str, Any]) -> list[Any]:
        return [self._worker.call(verb, arguments)]

    def apply(self, function: Callable[[Any], Any]) -> list[Any]:
        return [function(self._worker)]

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None


def load_worker(name: str, device: str) -> Any:
    """Import torch for a device, then the class of a worker."""
    with _no_collection():
        load_object("octavo.runtime.late_modules:import_torch")(device)
        return load_object(name)


@contextmanager
def _no_collection() -> Iterator[None]:
    """What is imported meanwhile stays: to look it through again and again takes a tenth of an import."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _Reading(Future[ModelRunnerOutput]):
    """A step on the device, read by the thread that asks for it."""

    def __init__(self, worker: Any, step: SchedulerOutput) -> None:
        super().__init__()
        self._pending: Any = None
        try:
            self._pending = worker.execute(step)
        except Exception as error:  # handed on to whoever asks for the result
            self.set_exception(error)

    def sample(self, worker: Any, masks: TokenMasks) -> None:
        """Go on with a step whose masks were to follow; nothing is left to do for one that has failed."""
        if self._pending is not None:
            try:
                worker.sample(masks)
            except Exception as error:  # handed on to whoever asks for the result
                self._pending = None
                self.set_exception(error)

    def done(self) -> bool:
        """Return True if reading it would not wait."""
        return self._pending is None or self._pending.is_ready

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        """Wait for the step and return what it brought. Raises the step's error."""
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                self.set_result(pending.read())
            except Exception as error:
                self.set_exception(error)
        return super().result(timeout)


class LaunchedExecutor(InprocExecutor):
    """One rank in each of the processes that torchrun started, which meet where its variables say (`env://`).

    Every process has a whole engine and runs the same program. They plan the same steps, because they are
    given the same requests in the same order: a program must not make them depend on its rank.
    """

    def __init__(self) -> None:
        super().__init__(WORKER, env.launched_rank(), "env://")

    def start(self, config: EngineConfig) -> ModelReady:
        """Load this rank's part of the model, on a device of its own. Raises ConfigError."""
        if config.parallel.device != "cpu":
            config = replace(config, parallel=config.parallel.on_device(env.launched_device()))
        return super().start(config)
