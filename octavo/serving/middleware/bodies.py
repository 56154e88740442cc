"""`BodyCheck`: what a body may be, decided before it is read: JSON, not packed, not too large."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.serving.middleware import headers
from octavo.serving.middleware.refusal import refuse


class BodyCheck:
    """Refuses 413 for a body that is or grows too large, 415 for one in another form."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through, or refuse it."""
        length = headers.value(scope, b"content-length")
        is_chunked = bool(headers.values(scope, b"transfer-encoding"))
        if scope["type"] != "http" or not (is_chunked or length.strip("0")):
            await self._app(scope, receive, send)
        elif not length.isdecimal() and not is_chunked:
            await refuse(scope, send, 400, "Content-Length must be a number.")
        elif headers.value(scope, b"content-encoding").lower() not in ("", "identity"):
            await refuse(scope, send, 415, "Packed bodies are not read: send no Content-Encoding.")
        elif not _is_json(headers.value(scope, b"content-type")):
            await refuse(scope, send, 415, "The body must be JSON: send Content-Type: application/json.")
        elif is_chunked:
            await _Counted(self._max_bytes, scope, receive, send).run(self._app)
        elif int(length) > self._max_bytes:
            await refuse(scope, send, 413, _too_large(self._max_bytes))
        else:
            await self._app(scope, receive, send)


class _Counted:
    """One request whose body comes in chunks: when it grows too large, the application sees a disconnect."""

    def __init__(self, max_bytes: int, scope: Scope, receive: Receive, send: Send) -> None:
        self._left = self._max_bytes = max_bytes
        self._scope, self._receive, self._send = scope, receive, send
        self._is_refused = False

    async def run(self, app: ASGIApp) -> None:
        await app(self._scope, self._take, self._give)

    async def _take(self) -> Message:
        message = {"type": "http.disconnect"} if self._is_refused else await self._receive()
        self._left -= len(message.get("body", b""))
        if self._left < 0 and not self._is_refused:
            self._is_refused = True
            await refuse(self._scope, self._send, 413, _too_large(self._max_bytes))
            return {"type": "http.disconnect"}
        return message

    async def _give(self, message: Message) -> None:
        if not self._is_refused:
            await self._send(message)


def _is_json(content_type: str) -> bool:
    media_type = content_type.partition(";")[0].strip().lower()
    return media_type == "application/json"


def _too_large(max_bytes: int) -> str:
    return f"The body is larger than {max_bytes} bytes, the most that this server reads (max_request_bytes)."
