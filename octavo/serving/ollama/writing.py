"""POST /api/chat and /api/generate: text in Ollama's form, as lines of JSON or whole."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.base.errors import wrong
from octavo.frontend.parsers.events import Text
from octavo.serving.body import convert, read_body
from octavo.serving.caller import Caller
from octavo.serving.errors import http_error, message_of
from octavo.serving.ollama import protocol
from octavo.serving.ollama.written_answer import WrittenAnswer
from octavo.serving.openai.answers import encode, json_response
from octavo.serving.openai.completions import prepare
from octavo.serving.openai.protocol import ChatRequest, CompletionRequest
from octavo.serving.openai.turn import TurnEnd, TurnEvent, TurnStart, turn_events
from octavo.serving.openai.usage import Meter
from octavo.serving.registry import Route
from octavo.serving.streaming import EventStream, leaving, unless_gone

Turn = AsyncGenerator[TurnEvent, None]
W = TypeVar("W", protocol.OllamaChat, protocol.OllamaGenerate)


async def ollama_chat(request: Request) -> Response:
    """The model's turn in a conversation, in Ollama's form: lines of JSON, unless stream is false."""
    body, caller, answer = await _asked(request, protocol.OllamaChat)
    if not body.messages:
        return json_response(answer.nothing("load" if body.needs_model else "unload"))
    fields = {"messages": protocol.checked_messages(body.messages), "tools": body.tools or None}
    return await _response(request, caller, body, turn_events(caller, _chat_request(body, fields)), answer)


async def ollama_generate(request: Request) -> Response:
    """The answer to a prompt, in Ollama's form; the prompt is put into the chat template unless raw."""
    body, caller, answer = await _asked(request, protocol.OllamaGenerate)
    if not body.prompt:
        return json_response(answer.nothing("load" if body.needs_model else "unload"))
    if body.raw or body.suffix or not caller.engine.chat.has_template:
        if body.images:
            raise wrong("images", "need a chat template: leave raw and suffix out")
        turn = _completion_events(caller, _completion_request(body))
    else:
        system = [{"role": "system", "content": body.system}] if body.system else []
        messages = [*system, {"role": "user", "content": protocol.content_of(body.prompt, body.images)}]
        turn = turn_events(caller, _chat_request(body, {"messages": messages}))
    return await _response(request, caller, body, turn, answer)


async def _asked(request: Request, kind: type[W]) -> tuple[W, Caller, WrittenAnswer]:
    """Read a body, and have its model stay as it says."""
    began_s = time.monotonic()
    body = await read_body(request, kind, takes_place=True, any_type=True)
    caller = Caller.of(request).asking(body.model)
    caller.engines.keep(caller.model, body.keep_s)
    return body, caller, WrittenAnswer(body.model, began_s, is_chat=kind is protocol.OllamaChat)


def _chat_request(body: protocol.WritingFields, fields: dict[str, Any]) -> ChatRequest:
    """Raises RequestError for an option that is out of its range."""
    given = {
        **fields,
        "model": body.model,
        "options": body.options,
        "format": body.format,
        "think": body.think,
        "logprobs": body.logprobs,
        "top_logprobs": body.top_logprobs if body.logprobs else None,
        "stream": True,
    }
    return convert({name: value for name, value in given.items() if value}, ChatRequest, strict=False)


def _completion_request(body: protocol.OllamaGenerate) -> CompletionRequest:
    prompt = body.prompt if not body.system else f"{body.system}\n{body.prompt}"
    given = {
        "model": body.model,
        "prompt": prompt,
        "suffix": body.suffix,
        "options": body.options,
        "format": body.format,
        "stream": True,
    }
    return convert({name: value for name, value in given.items() if value}, CompletionRequest, strict=False)


async def _completion_events(caller: Caller, body: CompletionRequest) -> Turn:
    """The events of a plain completion, which ends with the context unless the body says when."""
    generation, _ = prepare(caller, body)
    if body.max_tokens is None:
        params = msgspec.structs.replace(generation.params, max_tokens=None)
        generation = replace(generation, params=params)
    meter, has_begun = Meter(body, caller.config), False
    async with aclosing(generation.outputs()) as outputs:
        async for index, output in outputs:
            meter.count(index, output)
            if not has_begun:
                has_begun = True
                yield TurnStart(meter.usage())
            [completion] = output.outputs
            if completion.text:
                yield Text(completion.text)
            if (reason := completion.finish_reason) is not None:
                yield TurnEnd(reason, completion.stop_reason, meter.usage())  # type: ignore[arg-type]


async def _response(
    request: Request, caller: Caller, body: protocol.WritingFields, turn: Turn, answer: WrittenAnswer
) -> Response:
    if body.stream:
        return LineStream(_lines(turn, answer), caller.config)
    return json_response(await unless_gone(leaving(request.receive), _whole(turn, answer)))


async def _lines(turn: Turn, answer: WrittenAnswer) -> AsyncGenerator[bytes, None]:
    async with aclosing(turn):
        async for event in turn:
            if data := b"".join(encode(line) + b"\n" for line in answer.lines(event)):
                yield data


async def _whole(turn: Turn, answer: WrittenAnswer) -> protocol.Written:
    async with aclosing(turn):
        async for event in turn:
            for _ in answer.lines(event):
                pass  # told to nobody
    return answer.whole()


def error_response(error: BaseException) -> Response:
    """The whole answer to a request that failed before anything was sent, in Ollama's form."""
    told = http_error(error)
    return json_response(protocol.OllamaError(message_of(told)), told.status, told.headers)


class LineStream(EventStream):
    """An answer in lines of JSON; its silence cannot be broken."""

    keep_alive = b""
    head: ClassVar = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-cache")]

    def refusal(self, error: Exception) -> Response:
        return error_response(error)

    def last_words(self, error: Exception) -> bytes:
        return encode(protocol.OllamaError(message_of(http_error(error)))) + b"\n"


_SAME = {"error_model": protocol.OllamaError, "error_response": error_response}
ROUTES = [
    Route("/api/chat", ollama_chat, protocol.OllamaChat, protocol.Written, streams=True, **_SAME),  # type: ignore[arg-type]
    Route("/api/generate", ollama_generate, protocol.OllamaGenerate, protocol.Written, streams=True, **_SAME),  # type: ignore[arg-type]
]
