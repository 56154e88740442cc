"""`turn_events`: the model's turn as events, for the dialects beside chat completions.

Used by the routes of responses and of Anthropic's messages.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from msgspec import structs

from octavo.frontend.engine_metrics import RequestType
from octavo.frontend.parsers.events import Event, Reasoning, Text
from octavo.serving.caller import Caller
from octavo.serving.openai.answers import FinishReason, TokenLogprob, Usage
from octavo.serving.openai.chat import prepare
from octavo.serving.openai.protocol import ChatRequest


@dataclass(frozen=True, slots=True)
class TurnStart:
    """The first event: the prompt has been computed."""

    usage: Usage


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """The last event."""

    finish_reason: FinishReason
    stop_reason: int | str | None
    """The stop string or token that ended it."""
    usage: Usage
    num_reasoning_tokens: int
    """Of the usage's completion tokens."""


@dataclass(frozen=True, slots=True)
class TextLogprobs:
    """Of the tokens of the next text, where they were asked for."""

    entries: list[TokenLogprob]


TurnEvent = TurnStart | Event | TextLogprobs | TurnEnd


async def turn_events(
    caller: Caller, body: ChatRequest, request_type: RequestType = "other"
) -> AsyncGenerator[TurnEvent, None]:
    """The one answer to the body's conversation; close it to abort.

    Raises RequestError and Overloaded before the first event, EngineDead and HTTPError at any time.
    """
    body = structs.replace(body, stream=True)
    generation, answer = prepare(caller, body, [body.messages], request_type)
    num_reasoning, num_unread, has_begun = 0, 0, False
    logprobs: list[TokenLogprob] = []
    async with aclosing(generation.outputs()) as outputs:
        async for index, output in outputs:
            answer.count(index, output)
            if not has_begun:
                has_begun = True
                yield TurnStart(answer.usage())
            for completion in output.outputs:
                num_unread += len(completion.token_ids)
                logprobs += answer.logprobs(completion)
                if events := answer.read(index, output, completion):
                    num_reasoning += num_unread * isinstance(events[-1], Reasoning)
                    if logprobs and isinstance(events[-1], Text):
                        yield TextLogprobs(logprobs)
                    num_unread, logprobs = 0, []
                for event in events:
                    yield event
                if (reason := answer.finish_reason(index, completion)) is not None:
                    yield TurnEnd(reason, completion.stop_reason, answer.usage(), num_reasoning)
