"""Errors in Anthropic's form: `{"type": "error", "error": {"type", "message"}}`. Used by `messages`."""

from starlette.responses import Response

from octavo.serving.anthropic.answers import MessageError, MessageErrorDetail
from octavo.serving.errors import http_error, message_of
from octavo.serving.openai.answers import json_response
from octavo.serving.streaming import EventStream, named_event

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_response(error: BaseException) -> Response:
    """The whole answer to a request that failed before anything was sent."""
    told = http_error(error)
    return json_response(MessageError(_detail(error)), told.status, told.headers)


class MessageStream(EventStream):
    """An answer in events, which tells its errors in Anthropic's form."""

    keep_alive = named_event({"type": "ping"})

    def refusal(self, error: Exception) -> Response:
        """The answer to a request that failed before its first event."""
        return error_response(error)

    def last_words(self, error: Exception) -> bytes:
        """The event that ends a stream that failed."""
        return named_event({"type": "error", "error": _detail(error)})


def _detail(error: BaseException) -> MessageErrorDetail:
    told = http_error(error)
    kind = _TYPES.get(told.status, "invalid_request_error" if told.status < 500 else "api_error")
    return MessageErrorDetail(kind, message_of(told))
