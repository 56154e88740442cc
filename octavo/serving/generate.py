"""POST /generate and /generate_stream: one prompt in, plain text out, for scripts that need no protocol."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.frontend.outputs.request_output import RequestOutput
from octavo.serving.body import read_body
from octavo.serving.caller import Caller
from octavo.serving.openai.answers import FinishReason
from octavo.serving.openai.generation import Generation
from octavo.serving.openai.protocol import GenerateRequest
from octavo.serving.registry import Route
from octavo.serving.streaming import DONE, EventStream, event


class Generated(msgspec.Struct):
    """The whole answer."""

    text: list[str]
    """The prompt and what follows it, for each of the n sequences."""
    token_ids: list[list[int]]
    """Of what follows."""
    finish_reasons: list[FinishReason]
    num_prompt_tokens: int


async def generate(request: Request) -> Response:
    """The text that follows a prompt; with stream=true as of /generate_stream."""
    return await _answer(request, streams=False)


async def generate_stream(request: Request) -> Response:
    """The text that follows a prompt, piece by piece."""
    return await _answer(request, streams=True)


async def _answer(request: Request, *, streams: bool) -> Response:
    caller = Caller.of(request)
    body = await read_body(request, GenerateRequest, takes_place=True)
    body.stream = streams or body.stream
    generation = Generation.of(caller, body, "gen", [body.prompt])
    if body.stream:
        return EventStream(_events(generation), caller.config)
    return await generation.whole_response(request, _generated)


def _generated(outputs: list[RequestOutput]) -> Generated:
    [output] = outputs
    return Generated(
        [(output.prompt or "") + completion.text for completion in output.outputs],
        [list(completion.token_ids) for completion in output.outputs],
        [completion.finish_reason for completion in output.outputs],  # type: ignore[misc]  # all have ended
        len(output.prompt_token_ids or ()),
    )


async def _events(generation: Generation) -> AsyncGenerator[bytes, None]:
    async with aclosing(generation.outputs()) as outputs:
        async for _, output in outputs:
            pieces = []
            for new in output.outputs:
                told = {"index": new.index, "text": new.text, "token_ids": list(new.token_ids)}
                pieces.append(event(msgspec.json.encode(told | {"finish_reason": new.finish_reason})))
            yield b"".join(pieces)
    yield DONE


ROUTES = [
    Route("/generate", generate, GenerateRequest, Generated, streams=True),
    Route("/generate_stream", generate_stream, GenerateRequest, streams=True),
]
