"""POST /invocations, for SageMaker's clients: the body's form says whether it is a chat or a completion."""

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from octavo.base.errors import RequestError
from octavo.serving.body import convert, decode, read_parsed
from octavo.serving.caller import Caller
from octavo.serving.openai import chat, completions
from octavo.serving.openai.answers import ChatCompletion
from octavo.serving.openai.protocol import ChatRequest, CompletionRequest
from octavo.serving.registry import Route


async def invoke(request: Request) -> Response:
    """The model's turn in a conversation (`messages`), or the text that follows a prompt (`prompt`)."""
    caller = Caller.of(request)
    body = await read_parsed(request, partial(_parse, strict=caller.config.strict), takes_place=True)
    if isinstance(body, ChatRequest):
        generation, chat_answer = chat.prepare(caller, body)
        return await generation.response(request, chat_answer)
    generation, answer = completions.prepare(caller, body)
    return await generation.response(request, answer)


def _parse(content: bytes, *, strict: bool) -> ChatRequest | CompletionRequest:
    fields = decode(content)
    if "messages" in fields:
        return convert(fields, ChatRequest, strict=strict)
    if "prompt" in fields or "prompt_embeds" in fields:
        return convert(fields, CompletionRequest, strict=strict)
    raise RequestError("Give messages for a chat, or prompt for a completion.", "messages")


ROUTES = [Route("/invocations", invoke, response_model=ChatCompletion, methods=("POST",))]
