"""Errors as HTTP answers: status and `{"error": {"message", "type", "param", "code"}}`, whatever was raised.

Called by `app` and by every stream. What is not an OctavoError is logged and told to nobody.
"""

import re
from collections.abc import Mapping
from http import HTTPStatus

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from octavo.base import errors
from octavo.base.log import get_logger

logger = get_logger(__name__)
_MAX_MESSAGE_BYTES = 1800
_CONTROL = re.compile(r"[\x00-\x1f\x7f]+")
_INNER = re.compile(
    r"0x[0-9a-fA-F]{6,}|/(?:data|etc|home|mnt|opt|root|run|srv|tmp|usr|var|work)/[^\s'\",;:)]*|site-packages"
)
"""Addresses and paths of this machine: of use to nobody but an attacker."""
_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    499: "RequestAbortedError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
    507: "InsufficientStorageError",
}

_STATUSES = {errors.UnfetchedMedia: 422, errors.UnknownModel: 404}
"""Of requests at fault; 400 for all others."""


class HTTPError(errors.OctavoError):
    """An error that says its status itself."""

    def __init__(
        self,
        status: int,
        message: str,
        parameter: str | None = None,
        *,
        kind: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.parameter = parameter
        self.kind = kind or _TYPES.get(status, "InternalServerError")
        self.headers = dict(headers or {})


class ClientGone(HTTPError):
    """Nobody waits for the answer any more."""

    def __init__(self) -> None:
        super().__init__(499, "The client has gone.")


class ErrorDetail(msgspec.Struct):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: int
    """The HTTP status."""


class ErrorBody(msgspec.Struct):
    """The body of every error."""

    error: ErrorDetail


def http_error(error: BaseException) -> HTTPError:
    """What the client is told of an error; what he is not told goes to the log."""
    match error:
        case HTTPError():
            return error
        case errors.RequestError(parameter=parameter):
            return HTTPError(_STATUSES.get(type(error), 400), str(error), parameter)
        case errors.Unsupported() | errors.ConfigError():
            return HTTPError(501, str(error))
        case errors.Overloaded(retry_after_s=retry_after_s):
            return HTTPError(503, str(error), headers=_retry_after(retry_after_s))
        case errors.EngineDead(retry_after_s=retry_after_s):
            logger.error("A request ended with the engine: %s", error)
            again = "No other one is coming." if retry_after_s is None else "Try again in a moment."
            headers = None if retry_after_s is None else _retry_after(retry_after_s)
            text = f"The engine has stopped and this request with it. {again}"
            return HTTPError(503, text, kind="engine_dead", headers=headers)
        case HTTPException(status_code=status, detail=detail):
            return HTTPError(status, str(detail), headers=error.headers)
    logger.error("A request failed inside octavo.", exc_info=error)
    return HTTPError(500, "Internal error while handling this request; the server's log has the details.")


def message_of(error: HTTPError) -> str:
    """What may be shown of its text, in 1.8 KB at most."""
    shown = _INNER.sub("…", _CONTROL.sub(" ", str(error)[:_MAX_MESSAGE_BYTES]))
    return shown.encode(errors="replace")[:_MAX_MESSAGE_BYTES].decode(errors="ignore")


def error_body(error: BaseException) -> bytes:
    """The JSON object of an error, at most 4 KB."""
    told = http_error(error)
    parameter = told.parameter[:100] if told.parameter else None
    return msgspec.json.encode(ErrorBody(ErrorDetail(message_of(told), told.kind, parameter, told.status)))


def error_response(error: BaseException) -> Response:
    """The whole answer to a request that failed before anything was sent."""
    told = http_error(error)
    return Response(error_body(told), told.status, told.headers, media_type="application/json")


async def handle_exception(request: Request, error: Exception) -> Response:
    """For Starlette, which raises its own: unknown paths, wrong methods. OPTIONS asks for the right ones."""
    if request.method == "OPTIONS" and isinstance(error, HTTPException) and error.status_code == 405:
        return Response(status_code=204, headers=error.headers)
    if isinstance(error, HTTPException) and error.detail == HTTPStatus(error.status_code).phrase:
        text = f"{error.detail}: {request.method} {request.url.path[:200]}."
        error = HTTPError(error.status_code, text, headers=error.headers)
    return error_response(error)


def _retry_after(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, round(seconds)))}
