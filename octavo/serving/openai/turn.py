"""`Turn`: what the engine brings to a chat request, read as events. Every dialect folds them.

Chat completions read its steps. Responses and Anthropic's messages read `turn_events`.
"""

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from msgspec import structs

from octavo.frontend.observe.engine_metrics import RequestType
from octavo.frontend.outputs.request_output import CompletionOutput, RequestOutput
from octavo.frontend.parsers.answer import AnswerParser
from octavo.frontend.parsers.events import Event, Reasoning, Text, coalesced
from octavo.serving.caller import Caller
from octavo.serving.openai.answers import ChatLogprobs, FinishReason, TokenLogprob, Usage
from octavo.serving.openai.generation import Conversation, Generation
from octavo.serving.openai.logprobs import logprob_writer
from octavo.serving.openai.protocol import ChatRequest, Message, TokenizeRequest
from octavo.serving.openai.reasoning import ReasoningCount
from octavo.serving.openai.tools import ToolUse
from octavo.serving.openai.usage import NOTHING_CACHED, CacheUse, Meter

TURN = "chatcmpl"
"""What the names of chat requests begin with, in their answers and in the engine."""


@dataclass(slots=True)
class Step:
    """What one output adds to one choice."""

    number: int
    """Of the choice."""
    is_first: bool
    events: list[Event]
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    completion: CompletionOutput


class Turn:
    """Reads the outputs of one request, of one conversation or several, whole ones or deltas."""

    def __init__(
        self, caller: Caller, request: ChatRequest, make_parser: Callable[[str], AnswerParser | None]
    ) -> None:
        """make_parser: of an answer to this prompt."""
        self.caller = caller
        self.request = request
        self.meter = Meter(request, caller.config)
        self._make_parser = make_parser
        self._parsers: dict[int, AnswerParser | None] = {}
        """By choice."""
        self._reasoning = ReasoningCount(caller.engine.tokenizer)
        self._shows_reasoning = request.include_reasoning is not False
        num_top = (request.top_logprobs or 0) if request.logprobs else None
        self._logprobs = logprob_writer(caller, request, num_top)

    def steps(self, index: int, output: RequestOutput) -> Iterator[Step]:
        """What a new output of conversation `index` adds to each of its choices. To be exhausted."""
        self.meter.count(index, output)
        for completion in output.outputs:
            number = index * (self.request.n or 1) + completion.index
            is_first = number not in self._parsers
            if is_first:
                self._parsers[number] = self._make_parser(output.prompt or "")
            parser = self._parsers[number]
            events = self._read(number, parser, completion)
            reason: FinishReason | None = completion.finish_reason  # type: ignore[assignment]  # others are errors
            if reason == "stop" and parser is not None and parser.num_calls:
                reason = "tool_calls"
            yield Step(number, is_first, events, self._written_logprobs(completion), reason, completion)

    def _read(self, number: int, parser: AnswerParser | None, completion: CompletionOutput) -> list[Event]:
        """What the new text says; what was held back comes at the end."""
        if parser is None:
            return [Text(completion.text)] if completion.text else []
        events = parser.feed(completion.text)
        if completion.finish_reason is not None:
            events = coalesced(events + parser.finish())
        self.meter.num_reasoning += self._reasoning.count(number, completion, events)
        if self._shows_reasoning:
            return events
        return [event for event in events if not isinstance(event, Reasoning)]

    def _written_logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        if self._logprobs is None or completion.logprobs is None:
            return None
        return self._logprobs.chat(completion.token_ids, completion.logprobs)


def prepare_turn(
    caller: Caller,
    body: ChatRequest,
    conversations: Sequence[Sequence[Message]],
    request_type: RequestType = "chat_completions",
    kept: Sequence[Message] | None = None,
) -> tuple[Generation, Turn]:
    """The engine's work for the conversations of a checked body, and the reader of what it brings.

    request_type: a label of metrics; kept: of each, as in Conversation.

    Nothing is started yet. Raises RequestError.
    """
    caller = caller.asking(body.model)
    use = ToolUse.of(body)
    if use.mode in ("required", "named"):
        body = structs.replace(body, response_format=None)  # it is for texts, and there will be none
    options = render_options(caller, body) | {"tools": use.described()}
    prompts = [Conversation(messages, options, kept) for messages in conversations]
    generation = Generation.of(caller, body, TURN, prompts, add_special_tokens=False)
    generation = replace(generation, params=use.constrained(generation.params, caller.engine.chat))
    note = partial(caller.engine.metrics.note_tool_parsing, request_type, bool(body.stream))
    make_parser = partial(use.parser, renderer=caller.engine.chat, params=generation.params, note=note)
    return generation, Turn(caller, body, make_parser)


def thinking_variables(*, is_on: bool) -> dict[str, bool]:
    """Whether the model is to think, under the names that templates have for it."""
    return {"enable_thinking": is_on, "thinking": is_on}


def render_options(caller: Caller, body: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """What the template is told besides the messages."""
    variables = dict(caller.config.default_chat_template_kwargs)
    if (effort := body.reasoning_effort) is not None:
        variables |= {"reasoning_effort": effort, **thinking_variables(is_on=effort != "none")}
    variables |= body.chat_template_kwargs or {}
    continues = bool(body.continue_final_message)
    opens = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    return {
        "documents": body.documents,
        "add_generation_prompt": opens,
        "continue_final_message": continues,
        "chat_template_kwargs": variables,
    }


@dataclass(frozen=True, slots=True)
class TurnStart:
    """The first event: the prompt has been computed."""

    usage: Usage
    cache: CacheUse = NOTHING_CACHED


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """The last event."""

    finish_reason: FinishReason
    stop_reason: int | str | None
    """The stop string or token that ended it."""
    usage: Usage
    cache: CacheUse = NOTHING_CACHED


@dataclass(frozen=True, slots=True)
class TextLogprobs:
    """Of the tokens of the next text, where they were asked for."""

    entries: list[TokenLogprob]


TurnEvent = TurnStart | Event | TextLogprobs | TurnEnd


async def turn_events(
    caller: Caller,
    body: ChatRequest,
    request_type: RequestType = "other",
    kept: Sequence[Message] | None = None,
) -> AsyncGenerator[TurnEvent, None]:
    """The one answer to the body's conversation, of which `kept` stays in the cache; close it to abort.

    Raises RequestError and Overloaded before the first event, EngineDead and HTTPError at any time.
    """
    body = structs.replace(body, stream=True)
    generation, turn = prepare_turn(caller, body, [body.messages], request_type, kept)
    logprobs: list[TokenLogprob] = []
    async with aclosing(generation.outputs()) as outputs:
        async for index, output in outputs:
            for step in turn.steps(index, output):
                if step.is_first:
                    yield TurnStart(turn.meter.usage(), turn.meter.cache_use())
                logprobs += step.logprobs.content if step.logprobs is not None else ()
                if step.events:
                    if logprobs and isinstance(step.events[-1], Text):
                        yield TextLogprobs(logprobs)
                    logprobs = []
                for event in step.events:
                    yield event
                if step.finish_reason is not None:
                    stop_reason = step.completion.stop_reason
                    used = turn.meter.usage(), turn.meter.cache_use()
                    yield TurnEnd(step.finish_reason, stop_reason, *used)
