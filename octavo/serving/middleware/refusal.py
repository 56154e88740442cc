"""`refuse`: the answer of a middleware that does not let a request through, in OpenAI's form.

Used by the other modules of this package, and by the connection itself for what is no request.
"""

from collections.abc import Mapping

import msgspec
from starlette.types import Message, Scope, Send

_KINDS = {
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    503: "ServiceUnavailableError",
}


def error_body(status: int, message: str) -> bytes:
    """The JSON object of an error."""
    kind = _KINDS.get(status, "BadRequestError")
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": status}})


async def refuse(
    scope: Scope, send: Send, status: int, message: str, headers: Mapping[str, str] | None = None
) -> None:
    """Answer an HTTP request, or the opening of a WebSocket, with an error and nothing else."""
    prefix = "websocket." if scope["type"] == "websocket" else ""
    for part in _answer(status, error_body(status, message), headers or {}):
        await send(part | {"type": prefix + part["type"]})


def _answer(status: int, body: bytes, headers: Mapping[str, str]) -> tuple[Message, Message]:
    lines = {"content-type": "application/json", "content-length": str(len(body)), **headers}
    encoded = [(name.lower().encode(), value.encode("latin-1")) for name, value in lines.items()]
    return (
        {"type": "http.response.start", "status": status, "headers": encoded},
        {"type": "http.response.body", "body": body},
    )
