"""POST /v1/chat/completions. What is special about chat; the engine's part is `generation`."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.frontend.engine_metrics import RequestType
from octavo.serving.body import read_body
from octavo.serving.caller import Caller
from octavo.serving.openai.answers import ChatCompletion
from octavo.serving.openai.chat_answer import ChatAnswer
from octavo.serving.openai.generation import Conversation, Generation
from octavo.serving.openai.protocol import ChatRequest, Message, TokenizeRequest
from octavo.serving.openai.sampling import sampling_params, tokenization
from octavo.serving.openai.tools import ToolUse
from octavo.serving.registry import Route
from octavo.serving.streaming import EventStream


async def create_chat_completion(request: Request) -> Response:
    """The model's turn in a conversation, whole or as a stream of chunks."""
    caller = Caller.of(request)
    body = await read_body(request, ChatRequest, takes_place=True)
    generation, answer = prepare(caller, body, [body.messages])
    if body.stream:
        return EventStream(generation.events(answer), caller.config)
    return await generation.response(request, answer.whole)


def prepare(
    caller: Caller,
    body: ChatRequest,
    conversations: Sequence[Sequence[Message]],
    request_type: RequestType = "chat_completions",
) -> tuple[Generation, ChatAnswer]:
    """The engine's work for the conversations of a checked body, and the form of its answer.

    request_type: a label of metrics.

    Nothing is started yet. Raises RequestError.
    """
    model = caller.models.resolve(body.model)
    use = ToolUse.of(body)
    answer_id = turn_id(body.request_id or caller.request_id)
    options = render_options(caller, body) | {"tools": use.described()}
    params = sampling_params(body, caller.engine.input_processor.default_sampling_values())
    generation = Generation(
        caller=caller,
        request=body,
        request_id=answer_id,
        prompts=[Conversation(messages, options) for messages in conversations],
        params=use.constrained(params, caller.engine.chat),
        tokenization=tokenization(body, add_special_tokens=False),
    )
    note = partial(caller.engine.metrics.note_tool_parsing, request_type, bool(body.stream))
    reader = partial(use.parser, renderer=caller.engine.chat, params=generation.params, note=note)
    return generation, ChatAnswer(caller, body, conversations, answer_id, model, reader)


def turn_id(request_id: str) -> str:
    """What a chat request is called in its answer, and in the engine."""
    return f"chatcmpl-{request_id}"


def render_options(caller: Caller, body: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """What the template is told besides the messages."""
    variables = {**caller.config.default_chat_template_kwargs, **(body.chat_template_kwargs or {})}
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
    continues = bool(body.continue_final_message)
    opens = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    return {
        "documents": body.documents,
        "add_generation_prompt": opens,
        "continue_final_message": continues,
        "chat_template_kwargs": variables,
    }


ROUTES = [
    Route(
        "/v1/chat/completions",
        create_chat_completion,
        ("POST",),
        request_model=ChatRequest,
        response_model=ChatCompletion,
        streams=True,
    )
]
