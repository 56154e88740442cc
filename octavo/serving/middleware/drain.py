"""`Drain`: counts the requests under way, and lets no new ones in once the server is about to end.

The process asks it how many are left. What watches the server is answered to the end.
"""

import asyncio

from starlette._utils import get_route_path
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.serving.errors import HTTPError, error_response
from octavo.serving.middleware import headers

_WATCHING = {"/health", "/ping", "/version", "/load", "/metrics"}
_SMALL_BODY = 1 << 20
_REFUSAL = HTTPError(
    503,
    "The server is shutting down; nothing was done.",
    headers={"Retry-After": "5", "Connection": "close"},
)


class Drain:
    """Refuses 503, from `begin` on."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._num_open = 0
        self._is_draining = False
        self._is_idle = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through, or refuse it."""
        if get_route_path(scope) in _WATCHING:
            await self._app(scope, receive, send)
        elif self._is_draining:
            await _swallow(scope, receive)
            await error_response(_REFUSAL)(scope, receive, send)
        else:
            self._num_open += 1
            try:
                await self._app(scope, receive, send)
            finally:
                self._num_open -= 1
                if not self._num_open:
                    self._is_idle.set()

    @property
    def num_open(self) -> int:
        """Requests under way."""
        return self._num_open

    def begin(self) -> None:
        """Let nothing new in."""
        self._is_draining = True

    async def wait(self) -> None:
        """Until no request is under way."""
        while self._num_open:
            self._is_idle.clear()
            await self._is_idle.wait()


async def _swallow(scope: Scope, receive: Receive) -> None:
    """Read a small body: a connection closed with unread data is reset, and the answer may be lost with it."""
    length = headers.value(scope, b"content-length")
    if scope["type"] == "http" and length.isdecimal() and 0 < int(length) <= _SMALL_BODY:
        while (await receive()).get("more_body"):
            pass
