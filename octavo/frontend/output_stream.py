"""`OutputStream`: the outputs of one request on their way to one reader, at most one object behind."""

import asyncio
from copy import copy

from octavo.base.errors import OctavoError
from octavo.base.log import get_logger
from octavo.frontend.outputs import RequestOutput

logger = get_logger(__name__)


class OutputStream:
    """A queue of length one that merges: a slow reader gets fewer, larger outputs and costs no memory.

    Written and read on one event loop.
    """

    def __init__(self, *, is_delta: bool) -> None:
        self._is_delta = is_delta
        self._pending: RequestOutput | None = None
        self._error: Exception | None = None
        self._arrived = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """Add an output; one that was not read yet is merged with it. Raises nothing: `get` does."""
        if self._pending is None:
            self._pending = output
        else:
            self._merge(self._pending, output)
        self._arrived.set()

    def fail(self, error: Exception) -> None:
        """Nothing more comes: when what has come is read, `get` raises."""
        self._error = error
        self._arrived.set()

    async def get(self) -> RequestOutput:
        """The next output. Raises what `fail` was given, at every call after the last output."""
        await self._arrived.wait()
        pending, self._pending = self._pending, None
        if self._error is None:
            self._arrived.clear()
        elif pending is None:
            raise copy(self._error)  # many may have been given the same
        assert pending is not None
        return pending

    def _merge(self, pending: RequestOutput, output: RequestOutput) -> None:
        try:
            pending.add(output, aggregate=self._is_delta)
        except Exception:
            logger.exception("Request %s: its outputs could not be merged", output.request_id)
            self.fail(OctavoError("Internal error while handling the output of this request."))
