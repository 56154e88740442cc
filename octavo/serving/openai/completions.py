"""POST /v1/completions. What is special about completions; the engine's part is `generation`."""

from starlette.requests import Request
from starlette.responses import Response

from octavo.serving.body import read_body
from octavo.serving.caller import Caller
from octavo.serving.openai.answers import Completion
from octavo.serving.openai.completion_answer import CompletionAnswer
from octavo.serving.openai.generation import Generation
from octavo.serving.openai.prompts import prompts_of
from octavo.serving.openai.protocol import CompletionRequest
from octavo.serving.registry import Route


async def create_completion(request: Request) -> Response:
    """The text that follows each prompt, whole or as a stream of chunks."""
    caller = Caller.of(request)
    body = await read_body(request, CompletionRequest, takes_place=True)
    generation, answer = prepare(caller, body)
    return await generation.response(request, answer)


def prepare(caller: Caller, body: CompletionRequest) -> tuple[Generation, CompletionAnswer]:
    """The engine's work for a checked body, and the form of its answer. Nothing is started yet.

    Raises RequestError.
    """
    generation = Generation.of(caller, body, "cmpl", prompts_of(body, caller.engine.tokenizer))
    return generation, CompletionAnswer(generation.caller, body, generation.request_id)


ROUTES = [Route("/v1/completions", create_completion, CompletionRequest, Completion, streams=True)]
