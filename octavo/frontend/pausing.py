"""`Pausing`: a core as its operator reaches it, and pauses. The base of `Operator`."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, Protocol, TypeVar, get_args

from octavo.base.errors import RequestError, wrong

T = TypeVar("T")
PauseMode = Literal["abort", "wait", "keep"]
"""What becomes of open requests: they end; they are finished first; they stand still."""


class Core(Protocol):
    """An engine core as its operator needs it: a CoreLink, or a SteppedCore."""

    async def call(
        self, verb: str, arguments: dict[str, Any] | None = None, timeout_s: float | None = None
    ) -> Any:
        """Run a command of the core (engine/commands). Raises EngineDead; TimeoutError on an event loop."""

    async def apply(self, function: Callable[[Any], Any]) -> list[Any]:
        """Call a function with the worker of each rank. Raises Unsupported if it is in another process."""

    async def rest(self, seconds: float) -> None:
        """Wait."""

    async def aside(self, work: Callable[[], T]) -> T:
        """Return what `work` does; an event loop goes on meanwhile."""

    def open_keys(self) -> list[str]:
        """The keys of all open requests."""

    def end_all(self, keys: list[str]) -> None:
        """End these requests as aborted, and all those of other fronts."""

    async def finish_all(self, keys: list[str]) -> None:
        """Return when these requests have ended, and all those of other fronts that the core knows."""


class Pausing:
    """The verbs that others are made of."""

    def __init__(self, core: Core) -> None:
        self.is_frozen = False
        """Whether the core computes nothing, as far as it was asked from here."""
        self._core = core

    async def pause_generation(self, mode: PauseMode = "abort", *, clear_cache: bool = True) -> None:
        """Compute nothing until `resume_generation`; requests that come meanwhile wait.

        mode: what becomes of open requests: abort, wait (finish them first) or keep
        clear_cache: forget cached prompts too; requests that stand still are then computed anew
        """
        if mode not in get_args(PauseMode):
            raise wrong("mode", f"must be one of {', '.join(get_args(PauseMode))}, got {mode!r}")
        keys = self._core.open_keys()
        self.is_frozen = await self._core.call("pause", {"freeze": mode != "wait"})
        if mode == "abort":
            self._core.end_all(keys)
        elif mode == "wait" and not self.is_frozen:
            await self._core.finish_all(keys)
            self.is_frozen = await self._core.call("pause", {"freeze": True})
        if clear_cache:
            await self.reset_prefix_cache(reset_running_requests=True)

    async def resume_generation(self) -> None:
        """Go on. Raises OctavoError while the engine sleeps."""
        await self._core.call("resume")
        self.is_frozen = False

    async def is_paused(self) -> bool:
        """Return True from pause to resume, and while asleep."""
        return bool(await self._core.call("is_paused"))

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget all cached prompts; return whether everything that was asked for is forgotten.

        reset_running_requests: what running requests have computed too
        reset_connector: the files that engines of this model share too (kv_transfer_config), whoever wrote
            them. False without them, and for a kv_consumer, which writes none.
        """
        arguments = {"reset_running_requests": reset_running_requests, "reset_connector": reset_connector}
        return bool(await self._core.call("reset_prefix_cache", arguments))

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Run a command of the workers on every rank; return one result per rank.

        method: a command's name with named arguments; or a function, called with the worker, args and kwargs,
        where the workers are in this process
        timeout: seconds until TimeoutError; of no effect where the core is in this process
        """
        named = dict(kwargs or {})
        if callable(method):
            return await self._core.apply(lambda worker: method(worker, *args, **named))
        if args:
            text = f"Commands of workers take named arguments: collective_rpc({method!r}, kwargs=…)."
            raise RequestError(text, "args")
        arguments = {"verb": method, "arguments": named}
        results: list[Any] = await self._core.call("collective_rpc", arguments, timeout)
        return results

    @asynccontextmanager
    async def standing_still(self, mode: PauseMode) -> AsyncIterator[None]:
        """Pause, and go on afterwards unless the engine was paused before."""
        was_paused = await self.is_paused()
        await self.pause_generation(mode, clear_cache=False)
        try:
            yield
        finally:
            if not was_paused:
                await self.resume_generation()
