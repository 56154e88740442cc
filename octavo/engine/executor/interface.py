"""`Executor`: how the engine core speaks to the workers, wherever they run. Implemented beside this file.

The core starts an executor, hands it one SchedulerOutput per step and reads the results in the same order.
Steps are executed in the order in which they were given; several may be under way. An executor knows nothing
of requests' ends, blocks or policies.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from octavo.base.errors import Unsupported
from octavo.config.engine import EngineConfig
from octavo.messages.kv import CachePlan, ModelReady
from octavo.messages.request import RequestSpec
from octavo.messages.step import ModelRunnerOutput, SchedulerOutput, TokenMasks


class Executor(ABC):
    """All ranks of one model as one object; used by one thread."""

    def watch(self, on_loss: Callable[[Exception], None]) -> None:
        """Have `on_loss` called, on any thread, when workers are lost, also while idle; before `start`.

        An executor whose workers cannot be lost ignores it.
        """

    @abstractmethod
    def start(self, config: EngineConfig) -> ModelReady:
        """Load the model on every rank; say what its KV cache needs and what memory is left.

        Raises ConfigError when the user can mend it (options, model files), EngineDead when a worker ended.
        """

    @abstractmethod
    def allocate(self, plan: CachePlan) -> None:
        """Allocate the planned KV cache on every rank; once, before the first step."""

    @abstractmethod
    def execute(self, step: SchedulerOutput) -> "Future[ModelRunnerOutput]":
        """Give a step to the workers without waiting for it.

        The step is only read; it stays as it is from here on. An exception in the future means that the state
        of the workers is unknown: the core ends. Faults of one request come in ModelRunnerOutput.errors
        instead.
        """

    @abstractmethod
    def sample(self, masks: TokenMasks) -> None:
        """Let the step given last sample: the masks that were to follow it (`masks_follow`) are here.

        Until then it is computed but not sampled, and no other step is given. Does not wait; what goes wrong
        is the step's error.
        """

    @abstractmethod
    def call(self, verb: str, arguments: dict[str, Any]) -> list[Any]:
        """Run the workers' command `verb` on every rank, after the steps given so far; one result each."""

    def apply(self, function: Callable[[Any], Any]) -> list[Any]:
        """Run `function` on the worker object of every rank; one result each. Raises Unsupported."""
        raise Unsupported(
            "The workers run in processes of their own, and functions are not sent to processes (that takes "
            "pickle, which runs whatever it is given): name a command of the worker instead, or use one rank "
            "with distributed_executor_backend='inproc'."
        )

    def takes_time(self, spec: RequestSpec) -> bool:
        """Return True if `prepare` has something to read for this request."""
        return False

    def prepare(self, spec: RequestSpec) -> None:
        """Read what the workers will need for a request, before its first step; on any thread."""

    def use_pause(self) -> bool:
        """Prepare something for later, while there are no requests; return True if more is left.

        It takes some hundredths of a second.
        """
        return False

    def beat(self) -> None:
        """Find out whether the workers are still there; called about twice a second while no step is given.

        An executor whose workers cannot be lost ignores it; of others' loss it tells as `watch` says.
        """

    @abstractmethod
    def close(self) -> None:
        """End the workers and free their memory; may be called twice, and before `start`."""
