"""What an operator asks of a running engine: pause, sleep, caches, profiles, workers.

`EngineControl` is the half of LLMEngine that does so; async_control is its twin on an event loop. Checks of
arguments, and their form for the core (engine/commands), are functions that both use.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

from octavo.base.errors import RequestError, Unsupported
from octavo.config.engine import EngineConfig
from octavo.frontend.engine_metrics import SLEEP_STATES, EngineMetrics, SleepState
from octavo.metrics import Metric

PauseMode = Literal["abort", "wait", "keep"]
"""What becomes of open requests: they end; they are finished first; they stand still."""
TAGS = ("weights", "kv_cache")
TASKS = ("generate",)


def check_mode(mode: PauseMode) -> None:
    """Raise RequestError for an unknown mode."""
    if mode not in get_args(PauseMode):
        raise RequestError(f"mode must be one of {', '.join(get_args(PauseMode))}, got {mode!r}.", "mode")


def sleep_orders(level: int) -> dict[str, Any]:
    """What the core is told: 0 gives up nothing, 1 the KV cache, 2 the weights too. Raises RequestError."""
    if level not in (0, 1, 2):
        raise RequestError(f"level must be 0, 1 or 2, got {level!r}.", "level")
    return {"parts": list(TAGS) if level else [], "discard_weights": level == 2}


def sleep_state(level: int) -> SleepState:
    """The name of a level in metrics."""
    return SLEEP_STATES[level]


def wake_orders(tags: Sequence[str] | None) -> dict[str, Any]:
    """What the core is told; "scheduling" goes on by itself once nothing sleeps. Raises RequestError."""
    known = (*TAGS, "scheduling")
    if unknown := [tag for tag in tags or () if tag not in known]:
        raise RequestError(f"Unknown tags {', '.join(unknown)}. Known: {', '.join(known)}.", "tags")
    return {"parts": [tag for tag in tags or () if tag in TAGS]}


def rpc_orders(
    method: str | Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A command of the workers with named arguments, or a function of the worker for workers of this process.

    Raises Unsupported for positional arguments of a command.
    """
    if callable(method):
        return {"function": lambda worker: method(worker, *args, **(kwargs or {}))}
    if args:
        raise Unsupported(f"Commands of workers take named arguments: collective_rpc({method!r}, kwargs=…).")
    return {"verb": method, "arguments": dict(kwargs or {})}


def check_profiler(config: EngineConfig) -> None:
    """Raise Unsupported when there is no place for traces."""
    if not config.observability.profiler_dir:
        raise Unsupported("Profiling is off: name a folder for its traces, profiler_dir=…")


class EngineControl(ABC):
    """The verbs, one call of the core each."""

    config: EngineConfig
    metrics: EngineMetrics
    _is_frozen: bool = False

    @abstractmethod
    def _call(self, verb: str, arguments: dict[str, Any] | None = None) -> Any:
        """Run a command of the core."""

    @abstractmethod
    def _settle(self, mode: PauseMode) -> None:
        """Do with the open requests as `mode` says."""

    def pause_generation(self, mode: PauseMode = "abort", *, clear_cache: bool = True) -> None:
        """Compute nothing until `resume_generation`; new requests wait.

        clear_cache: forget cached prompts too; requests that stand still are then computed anew
        """
        check_mode(mode)
        self._settle(mode)
        self._call("pause", {"freeze": True})
        self._is_frozen = True
        if clear_cache:
            self.reset_prefix_cache(reset_running_requests=True)

    def resume_generation(self) -> None:
        """Go on. Raises RequestError while the engine sleeps."""
        self._call("resume")
        self._is_frozen = False

    def is_paused(self) -> bool:
        """True from pause to resume, and while asleep."""
        return bool(self._call("is_paused"))

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Pause, and give up memory until `wake_up`.

        level: 0 none; 1 the KV cache, and on a GPU its copy of the weights; 2 the weights too, which are then
        read from the checkpoint again
        mode: what becomes of open requests; those kept are computed anew
        """
        orders = sleep_orders(level)
        self.pause_generation(mode, clear_cache=False)
        self._call("sleep", orders)
        self.metrics.note_sleep_state(sleep_state(level))

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take memory back: of "weights", of "kv_cache", of all that sleeps when None; then go on."""
        if not self._call("wake_up", wake_orders(tags)):
            self._is_frozen = False
            self.metrics.note_sleep_state("awake")

    def is_sleeping(self) -> bool:
        """True while anything is given up."""
        return bool(self._call("is_sleeping"))

    def release_kv_cache_memory(self) -> None:
        """Give up the KV cache alone, until wake_up(["kv_cache"]); open requests end."""
        self.pause_generation("abort", clear_cache=False)
        self._call("sleep", {"parts": ["kv_cache"]})

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached prompts; always True.

        reset_running_requests: what running requests have computed too
        reset_connector: accepted; there is no cache outside this engine
        """
        del reset_connector
        return bool(self._call("reset_prefix_cache", {"reset_running_requests": reset_running_requests}))

    def reset_mm_cache(self) -> None:  # noqa: B027  # nothing to override
        """Nothing to forget: octavo serves text only."""

    def reset_encoder_cache(self) -> None:  # noqa: B027  # nothing to override
        """Nothing to forget: octavo serves text only."""

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Record on every rank what the device does. Raises Unsupported without profiler_dir."""
        check_profiler(self.config)
        self.collective_rpc("start_profile", kwargs={"prefix": profile_prefix or ""})

    def stop_profile(self) -> list[str]:
        """End the recording; the paths of the traces, one per rank."""
        check_profiler(self.config)
        return self.collective_rpc("stop_profile")

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Run a command of the workers on every rank; one result per rank.

        method: a command's name with named arguments; or a function, called with the worker, args and kwargs,
        where the workers are in this process
        timeout: accepted; a call in one's own process cannot be left
        """
        del timeout
        result: list[Any] = self._call("collective_rpc", rpc_orders(method, args, kwargs))
        return result

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """Call `func` with the model of each rank, if the workers are in this process; else Unsupported."""
        return self.collective_rpc(lambda worker: func(worker.model))

    def get_metrics(self) -> list[Metric]:
        """Everything counted so far, as objects with name, labels and value."""
        return self.metrics.snapshot()

    def get_supported_tasks(self) -> tuple[str, ...]:
        """What the model can do."""
        return TASKS
