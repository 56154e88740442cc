"""`Drain`: counts the requests under way, and lets no new ones in once the server is about to end.

The process asks it how many are left. What watches the server is answered to the end, and told by
`scope["state"]["is_draining"]`.
"""

import asyncio

from starlette._utils import get_route_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.serving.errors import HTTPError, error_response
from octavo.serving.middleware import headers

_WATCHING = {"/health", "/ping", "/version", "/load", "/metrics"}
_SMALL_BODY = 1 << 20
_GOING_AWAY = 1001
_POLL_S = 0.02
_REFUSAL = HTTPError(
    503, "The server is shutting down; nothing was done.", headers={"Retry-After": "5", "Connection": "close"}
)


class Drain:
    """Refuses 503, from `begin` on."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._open: dict[int, Scope] = {}
        self._is_draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if get_route_path(scope) in _WATCHING:
            scope["state"]["is_draining"] = self._is_draining
            await self._app(scope, receive, send)
        elif self._is_draining:
            await _swallow(scope, receive)
            await error_response(_REFUSAL)(scope, receive, send)
        else:
            self._open[id(scope)] = scope
            try:
                await self._app(scope, self._until_draining(scope, receive), send)
            finally:
                del self._open[id(scope)]

    @property
    def num_open(self) -> int:
        """Requests under way; a WebSocket between two requests is none."""
        return sum(not _is_at_rest(scope) for scope in self._open.values())

    def begin(self) -> None:
        """Let nothing new in."""
        self._is_draining = True

    async def wait(self) -> None:
        """Until no request is under way."""
        while self.num_open:
            await asyncio.sleep(_POLL_S)

    def _until_draining(self, scope: Scope, receive: Receive) -> Receive:
        """For a WebSocket: a request that comes too late is a goodbye."""

        async def receive_or_end() -> Message:
            message = await receive()
            is_late = self._is_draining and _is_at_rest(scope)
            return {"type": "websocket.disconnect", "code": _GOING_AWAY} if is_late else message

        return receive_or_end if scope["type"] == "websocket" else receive


def _is_at_rest(scope: Scope) -> bool:
    """What the handler of a WebSocket says of itself."""
    return scope["type"] == "websocket" and bool(scope["state"].get("is_at_rest"))


async def _swallow(scope: Scope, receive: Receive) -> None:
    """Read a small body: a connection closed on unread data is reset, and the answer may be lost with it."""
    length = headers.value(scope, b"content-length")
    if scope["type"] == "http" and length.isdecimal() and 0 < int(length) <= _SMALL_BODY:
        while (await receive()).get("more_body"):
            pass
