"""POST /v1/chat/completions/batch: several conversations in one request, one choice for each, in order."""

from starlette.requests import Request
from starlette.responses import Response

from octavo.base.errors import RequestError
from octavo.serving.body import read_body
from octavo.serving.caller import Caller
from octavo.serving.openai.answers import ChatCompletion
from octavo.serving.openai.chat import prepare
from octavo.serving.openai.protocol import BatchChatRequest
from octavo.serving.registry import Route


async def create_batch(request: Request) -> Response:
    """The model's turn in each of several conversations."""
    caller = Caller.of(request)
    body = await read_body(request, BatchChatRequest, takes_place=True)
    if body.stream:
        raise RequestError("A batch is not streamed: leave stream out.", "stream")
    if body.n not in (None, 1):
        raise RequestError(f"A batch has one choice for each conversation, got n={body.n}.", "n")
    generation, answer = prepare(caller, body, body.messages)
    return await generation.response(request, answer)


ROUTES = [Route("/v1/chat/completions/batch", create_batch, BatchChatRequest, ChatCompletion)]
