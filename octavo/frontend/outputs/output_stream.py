"""`OutputStream`: the outputs of one request on their way to one reader, at most one object behind."""

import asyncio
from copy import copy

from octavo.base.errors import OctavoError
from octavo.base.log import get_logger
from octavo.frontend.outputs.request_output import RequestOutput

logger = get_logger(__name__)


class OutputStream:
    """A queue of length one that merges: a slow reader gets fewer, larger outputs and costs no memory.

    Written and read on one event loop.
    """

    def __init__(self, *, is_delta: bool) -> None:
        self._is_delta = is_delta
        self._pending: RequestOutput | None = None
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None
        """Whoever waits for news."""

    def put(self, output: RequestOutput) -> None:
        """Add an output; one that was not read yet is merged with it. Raises nothing: `get` does."""
        if self._pending is None:
            self._pending = output
        else:
            self._merge(self._pending, output)
        self._wake()

    def fail(self, error: Exception) -> None:
        """Nothing more comes: when what has come is read, `get` raises."""
        self._error = error
        self._wake()

    async def get(self) -> RequestOutput:
        """The next output. Raises what `fail` was given, at every call after the last output."""
        if self._pending is None and self._error is None:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        pending, self._pending = self._pending, None
        if pending is None:
            assert self._error is not None
            raise copy(self._error)  # many may have been given the same
        return pending

    def _wake(self) -> None:
        if self._reader is not None:
            if not self._reader.done():  # it may have been cancelled
                self._reader.set_result(None)
            self._reader = None

    def _merge(self, pending: RequestOutput, output: RequestOutput) -> None:
        try:
            pending.add(output, aggregate=self._is_delta)
        except Exception:
            logger.exception("Request %s: its outputs could not be merged", output.request_id)
            self.fail(OctavoError("Internal error while handling the output of this request."))


class Results:
    """Collects the last outputs of several requests for one reader. Written and read on one event loop."""

    def __init__(self, count: int) -> None:
        self._outputs: list[RequestOutput | None] = [None] * count
        self._num_missing = count
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def put(self, index: int, output: RequestOutput) -> None:
        """Take an output of request `index`."""
        if output.finished and self._outputs[index] is None:
            self._outputs[index] = output
            self._num_missing -= 1
            if not self._num_missing and not self._done.done():
                self._done.set_result(None)

    def fail(self, error: Exception) -> None:
        """Nothing more comes."""
        if not self._done.done():
            self._done.set_exception(copy(error))

    async def get(self) -> list[RequestOutput]:
        """Wait for all outputs, in order. Raises what `fail` was given."""
        await self._done
        return [output for output in self._outputs if output is not None]
