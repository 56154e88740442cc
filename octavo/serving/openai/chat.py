"""POST /v1/chat/completions and …/batch. What is special about chat; the model's part is `turn`."""

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from octavo.base.errors import RequestError
from octavo.serving.body import read_body
from octavo.serving.caller import Caller
from octavo.serving.openai.answers import ChatCompletion
from octavo.serving.openai.chat_answer import ChatAnswer
from octavo.serving.openai.generation import Generation
from octavo.serving.openai.protocol import BatchChatRequest, ChatRequest, Message
from octavo.serving.openai.turn import prepare_turn
from octavo.serving.registry import Route


async def create_chat_completion(request: Request) -> Response:
    """The model's turn in a conversation, whole or as a stream of chunks."""
    caller = Caller.of(request)
    body = await read_body(request, ChatRequest, takes_place=True)
    generation, answer = prepare(caller, body)
    return await generation.response(request, answer)


def prepare(
    caller: Caller, body: ChatRequest, conversations: Sequence[Sequence[Message]] | None = None
) -> tuple[Generation, ChatAnswer]:
    """The engine's work for a checked body, and the form of its answer. Nothing is started yet.

    conversations: in place of the body's. Raises RequestError.
    """
    conversations = conversations or [body.messages]
    generation, turn = prepare_turn(caller, body, conversations)
    return generation, ChatAnswer(turn, conversations, generation.request_id, turn.caller.model)


async def create_batch(request: Request) -> Response:
    """The model's turn in each of several conversations: one choice for each, in order."""
    caller = Caller.of(request)
    body = await read_body(request, BatchChatRequest, takes_place=True)
    if body.stream:
        raise RequestError("A batch is not streamed: leave stream out.", "stream")
    if body.n not in (None, 1):
        raise RequestError(f"A batch has one choice for each conversation, got n={body.n}.", "n")
    generation, answer = prepare(caller, body, body.messages)
    return await generation.response(request, answer)


ROUTES = [
    Route("/v1/chat/completions", create_chat_completion, ChatRequest, ChatCompletion, streams=True),
    Route("/v1/chat/completions/batch", create_batch, BatchChatRequest, ChatCompletion),
]
