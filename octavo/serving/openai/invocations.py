"""POST /invocations, for SageMaker's clients: the body's form says which of the other routes it means."""

from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.base.errors import RequestError
from octavo.serving.body import convert, decode, read_parsed
from octavo.serving.caller import Caller
from octavo.serving.openai import chat, completions
from octavo.serving.openai.answers import ChatCompletion
from octavo.serving.openai.protocol import ChatRequest, CompletionRequest
from octavo.serving.pooling.embeddings import answer_to_texts
from octavo.serving.pooling.protocol import PoolingRequest, RerankRequest, ScoreRequest
from octavo.serving.pooling.scores import rerank, score
from octavo.serving.pooling.work import Answer, pooled
from octavo.serving.registry import Route

_FORMS: dict[str, type[Any]] = dict.fromkeys(("data_1", "queries", "text_1"), ScoreRequest)
_FORMS |= {"messages": ChatRequest, "prompt": CompletionRequest, "prompt_embeds": CompletionRequest}
_FORMS |= {"input": PoolingRequest, "query": RerankRequest}
_POOLING: dict[Any, Answer] = {PoolingRequest: answer_to_texts, RerankRequest: rerank, ScoreRequest: score}


async def invoke(request: Request) -> Response:
    """The turn in a conversation, what follows a prompt, or what a pooling model makes of its input."""
    caller = Caller.of(request)
    body = await read_parsed(request, partial(_parse, strict=caller.config.strict), takes_place=True)
    if type(body) in _POOLING:
        return await pooled(request, body, _POOLING[type(body)])
    if isinstance(body, ChatRequest):
        generation, chat_answer = chat.prepare(caller, body)
        return await generation.response(request, chat_answer)
    generation, answer = completions.prepare(caller, body)
    return await generation.response(request, answer)


def _parse(content: bytes, *, strict: bool) -> Any:
    fields = decode(content)
    for name, form in _FORMS.items():
        if name in fields:
            return convert(fields, form, strict=strict)
    text = "Give messages, or a prompt; for pooling models input, query and documents, or text_1 and text_2."
    raise RequestError(text, "messages")


ROUTES = [Route("/invocations", invoke, response_model=ChatCompletion, methods=("POST",))]
