"""/v1/chat/completions as a WebSocket: each text message is a request, answered by chunks as frames.

Sampling parameters are fields of the request, or entries of its object `sampling_params`. The last frame of
an answer has the finish reasons of all choices, and usage; then the next request may come. An error is told
in a frame, as over HTTP, and closes the socket with code 4001 and the beginning of its text.
"""

from contextlib import aclosing
from dataclasses import replace
from functools import partial
from itertools import count

from starlette.types import Receive
from starlette.websockets import WebSocket, WebSocketDisconnect

from octavo.serving.body import convert, decode, parse_aside
from octavo.serving.caller import Caller
from octavo.serving.errors import ClientGone, HTTPError, error_body, http_error
from octavo.serving.openai.answers import ChatChunk, Delta, FinishReason, encode
from octavo.serving.openai.chat import prepare
from octavo.serving.openai.protocol import ChatRequest
from octavo.serving.registry import WebSocketRoute
from octavo.serving.streaming import unless_gone

ERROR_CODE = 4001
_MAX_REASON_BYTES = 123


async def chat(socket: WebSocket) -> None:
    """Answer request after request until the client leaves or one fails."""
    await socket.accept()
    caller = Caller.of(socket)
    try:
        for number in count():
            socket.state.is_at_rest = True  # an end of the server need not wait for it
            text = await socket.receive_text()
            socket.state.is_at_rest = False
            if len(text) > caller.config.max_request_bytes:
                raise HTTPError(413, f"The message is larger than {caller.config.max_request_bytes} bytes.")
            turn = replace(caller, request_id=f"{caller.request_id}-{number}") if number else caller
            body = await parse_aside(text, partial(_read, strict=caller.config.strict))
            await unless_gone(_interrupted(socket.receive), _answer(socket, turn, body))
    except (WebSocketDisconnect, ClientGone):
        return
    except KeyError:
        await _fail(socket, HTTPError(400, "A request must be a text message."))
    except Exception as error:
        await _fail(socket, error)


def _read(text: str, *, strict: bool) -> ChatRequest:
    """A request; the entries of `sampling_params`, if it has such an object, are fields, but its own win."""
    fields = decode(text)
    if isinstance(params := fields.get("sampling_params"), dict):
        del fields["sampling_params"]
        fields = params | fields
    return convert(fields, ChatRequest, strict=strict)


async def _answer(socket: WebSocket, caller: Caller, body: ChatRequest) -> None:
    body.stream = True
    with await caller.engines.borrow(body.model or caller.model, body.lora):
        await _answer_there(socket, caller, body)


async def _answer_there(socket: WebSocket, caller: Caller, body: ChatRequest) -> None:
    generation, answer = prepare(caller, body)
    reasons: dict[int, FinishReason] = {}
    async with aclosing(generation.outputs()) as outputs:
        async for index, output in outputs:
            for chunk in answer.chunks(index, output):
                if _take_reason(chunk, reasons):
                    await socket.send_text(encode(chunk).decode())
    await socket.send_text(encode(answer.end_chunk(reasons)).decode())


def _take_reason(chunk: ChatChunk, reasons: dict[int, FinishReason]) -> bool:
    """Keep the finish reason for the last frame; whether anything else is in the chunk."""
    [choice] = chunk.choices
    if choice.finish_reason is None:
        return True
    reasons[choice.index], choice.finish_reason = choice.finish_reason, None
    return choice.delta != Delta(content="") or bool(choice.logprobs or choice.token_ids)


async def _interrupted(receive: Receive) -> None:
    """Until the client leaves. Raises HTTPError when it sends a request before it has its answer."""
    if (await receive())["type"] != "websocket.disconnect":
        raise HTTPError(400, "One request at a time: wait for the frame with the finish reasons.")


async def _fail(socket: WebSocket, error: Exception) -> None:
    told = http_error(error)
    reason = str(told).encode()[:_MAX_REASON_BYTES].decode(errors="ignore")
    await socket.send_text(error_body(told).decode())
    await socket.close(ERROR_CODE, reason)


ROUTES = [WebSocketRoute("/v1/chat/completions", chat)]
