"""One worker in the core's own process: a step is a plain call."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from octavo.base.registry import load_object
from octavo.config.engine import EngineConfig
from octavo.engine.executor import WORKER
from octavo.engine.executor.interface import Executor
from octavo.messages.kv import CachePlan, ModelReady
from octavo.messages.step import ModelRunnerOutput, SchedulerOutput


class InprocExecutor(Executor):
    """Runs the class named `worker` as rank 0; futures are complete when they are returned."""

    def __init__(self, worker: str = WORKER) -> None:
        self._worker_class = worker
        self._worker: Any = None

    def start(self, config: EngineConfig) -> ModelReady:
        """Load the model. Raises ConfigError."""
        self._worker = load_object(self._worker_class)(config, 0, "")
        ready: ModelReady = self._worker.load()
        return ready

    def allocate(self, plan: CachePlan) -> None:
        """Make the cache tensors."""
        self._worker.allocate(plan)

    def execute(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Run one step now; its error, if any, is the future's."""
        future: Future[ModelRunnerOutput] = Future()
        try:
            future.set_result(self._worker.execute(step))
        except Exception as error:  # handed on to whoever asks for the result
            future.set_exception(error)
        return future

    def call(self, verb: str, arguments: dict[str, Any]) -> list[Any]:
        """Run the worker's command `verb`: a list of one result."""
        return [self._worker.call(verb, arguments)]

    def apply(self, function: Callable[[Any], Any]) -> list[Any]:
        """Run `function` on the worker: a list of one result."""
        return [function(self._worker)]

    def close(self) -> None:
        """Free the model."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None
