"""POST /v1/messages and /v1/messages/count_tokens: what clients of Anthropic's API ask."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from octavo.serving.anthropic.answers import Message, MessageError, MessageErrorDetail, TokenCount
from octavo.serving.anthropic.conversation import chat_request, kept_messages
from octavo.serving.anthropic.message_answer import MessageAnswer
from octavo.serving.anthropic.protocol import CountTokensRequest, MessagesRequest
from octavo.serving.body import read_body
from octavo.serving.caller import Caller
from octavo.serving.errors import http_error, message_of
from octavo.serving.openai.answers import json_response
from octavo.serving.openai.tools import ToolUse
from octavo.serving.openai.turn import TurnEvent, render_options, turn_events
from octavo.serving.registry import Route
from octavo.serving.streaming import EventStream, leaving, named_event, unless_gone

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


async def create_message(request: Request) -> Response:
    """The model's turn in a conversation, whole or as a stream of events."""
    caller = Caller.of(request)
    body = await read_body(request, MessagesRequest, takes_place=True)
    caller = caller.asking(body.model)
    answer = MessageAnswer(f"msg_{caller.request_id}", caller.model)
    asked = chat_request(body)
    if not caller.engine.chat.reasoning_parser:
        asked.thinking_token_budget = None  # a model that does not think keeps to any budget
    turn = turn_events(caller, asked, kept=kept_messages(body))
    if body.stream:
        return MessageStream(_events(turn, answer), caller.config)
    await unless_gone(leaving(request.receive), _finish(turn, answer))
    return json_response(answer.message)


async def count_tokens(request: Request) -> Response:
    """The tokens of a conversation, with all that the model would be told."""
    caller = Caller.of(request)
    body = await read_body(request, CountTokensRequest)
    caller, asked = caller.asking(body.model), chat_request(body)
    options = render_options(caller, asked) | {"tools": ToolUse.of(asked).described()}
    with caller.engine.reserve():
        render = partial(caller.engine.chat.render, asked.messages, **options)
        rendered = await caller.engine.off_loop(render)
    number = TokenCount(len(rendered["prompt_token_ids"]))
    return json_response(number)


async def _events(
    turn: AsyncGenerator[TurnEvent, None], answer: MessageAnswer
) -> AsyncGenerator[bytes, None]:
    async with aclosing(turn) as events:
        async for event in events:
            if data := b"".join(map(named_event, answer.take(event))):
                yield data


async def _finish(turn: AsyncGenerator[TurnEvent, None], answer: MessageAnswer) -> None:
    async with aclosing(turn) as events:
        async for event in events:
            for _ in answer.take(event):
                pass  # told to nobody


def error_response(error: BaseException) -> Response:
    """The whole answer to a request that failed before anything was sent, in Anthropic's form."""
    told = http_error(error)
    return json_response(MessageError(_detail(error)), told.status, told.headers)


class MessageStream(EventStream):
    """An answer in events, which tells its errors in Anthropic's form."""

    keep_alive = named_event({"type": "ping"})

    def refusal(self, error: Exception) -> Response:
        return error_response(error)

    def last_words(self, error: Exception) -> bytes:
        return named_event({"type": "error", "error": _detail(error)})


def _detail(error: BaseException) -> MessageErrorDetail:
    told = http_error(error)
    kind = _ERROR_TYPES.get(told.status, "invalid_request_error" if told.status < 500 else "api_error")
    return MessageErrorDetail(kind, message_of(told))


_Route = partial(Route, error_model=MessageError, error_response=error_response)
ROUTES = [
    _Route("/v1/messages", create_message, MessagesRequest, Message, streams=True),
    _Route("/v1/messages/count_tokens", count_tokens, CountTokensRequest, TokenCount),
]
