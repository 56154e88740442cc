"""`OutputStream`: the outputs of one request on their way to one reader, at most one object behind."""

import asyncio

from octavo.frontend.outputs import RequestOutput


class OutputStream:
    """A queue of length one that merges: a slow reader gets fewer, larger outputs and costs no memory.

    Written and read on one event loop.
    """

    def __init__(self, *, is_delta: bool) -> None:
        self._is_delta = is_delta
        self._pending: RequestOutput | Exception | None = None
        self._arrived = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """Add an output; one that was not read yet is merged with it."""
        if isinstance(self._pending, RequestOutput):
            self._pending.add(output, aggregate=self._is_delta)
        else:
            self._pending = output
        self._arrived.set()

    def fail(self, error: Exception) -> None:
        """Make the reader's next `get` raise."""
        self._pending = error
        self._arrived.set()

    async def get(self) -> RequestOutput:
        """The next output. Raises what `fail` was given."""
        await self._arrived.wait()
        self._arrived.clear()
        pending, self._pending = self._pending, None
        assert pending is not None
        if isinstance(pending, Exception):
            raise pending
        return pending
