"""Several engine cores for an engine that is stepped by its caller: `LLM(data_parallel_size=2)`.

The verbs of `inproc.InprocClient`. The cores run in processes of their own, whether somebody steps or not; a
`BalancedDoor` on a thread's event loop reaches them.
"""

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from octavo.base.errors import EngineDead, Unsupported
from octavo.config.engine import EngineConfig
from octavo.frontend.client.balanced import BalancedDoor, LostReplica
from octavo.frontend.client.zmq import AsyncClient
from octavo.messages.control import Ready
from octavo.messages.request import EngineOutputs, EngineRequest

T = TypeVar("T")


class ReplicatedClient:
    """All replicas, used by one thread. After EngineDead only `close` may be called."""

    def __init__(self, config: EngineConfig) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_serve, args=(self._loop,), name="replicas", daemon=True)
        self._thread.start()
        self._door = BalancedDoor(config, AsyncClient)
        self._outputs = self._door.outputs()
        parts = self._loop, self._door, self._outputs  # objects of the loop's thread, which ends with them
        self._end = weakref.finalize(self, lambda: asyncio.run_coroutine_threadsafe(_end(*parts), parts[0]))
        self._end.atexit = False

    def start(self) -> Ready:
        """Load the model in every replica. Raises ConfigError when the user can mend it."""
        try:
            return self._run(self._door.start())
        except BaseException:
            self.close()
            raise

    def add(self, request: EngineRequest) -> None:
        """Hand over a request; it ends with exactly one finish reason in a later `step`."""
        self._run(_do(self._door.add, request))

    def abort(self, request_ids: list[str]) -> None:
        """End these requests; unknown and finished ids are skipped."""
        self._run(_do(self._door.abort, request_ids))

    def step(self) -> EngineOutputs:
        """Wait for what a step of any replica brings. Raises EngineDead when none is left."""
        return self._run(self._next())

    def call(self, verb: str, arguments: dict[str, Any] | None = None) -> Any:
        """Run the core's command `verb` in every replica; the results as one. Raises Unsupported."""
        if arguments and "function" in arguments:
            text = "With data_parallel_size > 1 no functions are sent to engines: name a worker's command."
            raise Unsupported(text)
        return self._run(self._door.call(verb, arguments))

    def close(self) -> None:
        """End the replicas; may be called twice."""
        self._end()
        self._thread.join()

    async def _next(self) -> EngineOutputs:
        async for outputs in self._outputs:
            if isinstance(outputs, LostReplica):
                return outputs.to_outputs()
            if isinstance(outputs, EngineOutputs):
                return outputs
        raise EngineDead("The engine has been shut down.")

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop.is_closed():
            work.close()
            raise EngineDead("The engine has been shut down.")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


async def _end(loop: asyncio.AbstractEventLoop, door: BalancedDoor, outputs: AsyncIterator[Any]) -> None:
    try:
        await door.close()
        await outputs.aclose()  # type: ignore[attr-defined]  # a generator
    finally:
        loop.stop()


async def _do(verb: Callable[[T], None], argument: T) -> None:
    verb(argument)
