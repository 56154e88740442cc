"""Answers that take time: server-sent events, and the watch for clients that leave before their answer.

A stream ends in one of three ways: a finish reason and [DONE]; an error event without [DONE]; a connection
that is cut. Its head is sent with the first event, so that a request that fails before gets a plain error.
"""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, ClassVar, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.base.log import get_logger
from octavo.config.server import ServerConfig
from octavo.serving.errors import ClientGone, error_body, error_response

logger = get_logger(__name__)
T = TypeVar("T")
StreamEvent = dict[str, Any]
"""What a dialect with named events tells: a JSON object with its `type`."""
DONE = b"data: [DONE]\n\n"
_HEAD = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def event(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + data + b"\n\n"


def named_event(told: StreamEvent) -> bytes:
    """A server-sent event that bears its type as name."""
    return b"event: %s\ndata: %s\n\n" % (told["type"].encode(), msgspec.json.encode(told))


class EventStream(Response):
    """An answer in events. However it ends, the generator is closed, which aborts what it asked for."""

    keep_alive = b": keep-alive\n\n"
    """What breaks a long silence."""
    head: ClassVar[list[tuple[bytes, bytes]]] = _HEAD

    def __init__(self, events: AsyncGenerator[bytes, None], config: ServerConfig) -> None:
        """events: ready to be sent; they include DONE when all went well."""
        self.status_code = 200
        self.background = None
        self._events = events
        self._interval_s = config.sse_keep_alive_interval or None
        self._has_started = False
        self._is_quiet = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events; an error before the first is answered as if there were no stream."""
        try:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(self._watch(receive, send))
                await self._run(scope, receive, send)
                watch.cancel()
        except* ClientGone:
            logger.debug("A client left its stream.")
        finally:
            await self._events.aclose()

    def refusal(self, error: Exception) -> Response:
        """The answer to a request that failed before its first event."""
        return error_response(error)

    def last_words(self, error: Exception) -> bytes:
        """The event that ends a stream that failed."""
        return event(error_body(error))

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async for data in self._events:
                await self._send(send, data)
        except ClientGone:
            raise
        except Exception as error:
            if not self._has_started:
                await self.refusal(error)(scope, receive, send)
                return
            await self._send(send, self.last_words(error))
        await self._send(send, b"", more=False)

    async def _send(self, send: Send, data: bytes, *, more: bool = True) -> None:
        try:
            if not self._has_started:
                self._has_started = True
                await send({"type": "http.response.start", "status": 200, "headers": list(self.head)})
            await send({"type": "http.response.body", "body": data, "more_body": more})
        except OSError as error:
            raise ClientGone from error
        self._is_quiet = False

    async def _watch(self, receive: Receive, send: Send) -> None:
        """Task: notice that the client leaves, and break the silence for proxies."""
        while True:
            try:
                async with asyncio.timeout(self._interval_s):
                    message = await receive()
            except TimeoutError:
                if self._is_quiet:
                    await self._send(send, self.keep_alive)
                self._is_quiet = True
                continue
            if message["type"] == "http.disconnect":
                raise ClientGone


async def unless_gone(watch: Coroutine[None, None, None], work: Coroutine[None, None, T]) -> T:
    """The result of `work`, cancelled when `watch` ends: then ClientGone, or what `watch` raised."""
    task, watching = asyncio.ensure_future(work), asyncio.ensure_future(watch)
    try:
        await asyncio.wait((task, watching), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        watching.result()
        raise ClientGone
    finally:
        for future in (task, watching):
            future.cancel()
        await asyncio.gather(task, watching, return_exceptions=True)


async def leaving(receive: Receive) -> None:
    """Until the client leaves; for `unless_gone`, once the body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
