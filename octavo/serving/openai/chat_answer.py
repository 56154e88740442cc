"""`ChatAnswer`: the steps of a `Turn` as chat.completion objects: the one place where they are made.

Used by the routes of chat, whole or streamed, over HTTP or WebSocket.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec import UNSET

from octavo.frontend.outputs.request_output import CompletionOutput, RequestOutput
from octavo.frontend.outputs.routed_experts import written
from octavo.frontend.parsers.events import CallArguments, CallStart, Event, Reasoning, Text
from octavo.serving.openai.answers import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatMessage,
    Delta,
    DeltaChoice,
    FinishReason,
    FunctionCall,
    ToolCall,
    ToolCallDelta,
)
from octavo.serving.openai.logprobs import prompt_logprobs
from octavo.serving.openai.protocol import ChatRequest, Message
from octavo.serving.openai.tools import call_id
from octavo.serving.openai.turn import Step, Turn


class ChatAnswer:
    """The answer to one request, of one conversation or several."""

    def __init__(
        self, turn: Turn, conversations: Sequence[Sequence[Message]], answer_id: str, model: str
    ) -> None:
        self._turn = turn
        self._meter = turn.meter
        self._request = turn.request
        head: dict[str, Any] = {"id": answer_id, "created": int(time.time()), "model": model}
        self._completion, self._chunk = partial(ChatCompletion, **head), partial(ChatChunk, **head)
        role = turn.caller.config.response_role
        self._openings = [_opening(turn.request, messages, role) for messages in conversations]

    def whole(self, outputs: Sequence[RequestOutput]) -> ChatCompletion:
        """The answer, from the last outputs of all conversations."""
        choices = [
            self._choice(step, *self._openings[index])
            for index, output in enumerate(outputs)
            for step in self._turn.steps(index, output)
        ]
        request, first = self._request, outputs[0]
        return self._completion(
            choices=choices,
            usage=self._meter.usage(),
            prompt_logprobs=prompt_logprobs(first.prompt_logprobs) if first.prompt_logprobs else None,
            prompt_token_ids=(first.prompt_token_ids or []) if request.return_token_ids else None,
            prompt_text=(first.prompt or "") if request.return_prompt_text else UNSET,
            kv_transfer_params=first.kv_transfer_params,
            metrics=self._meter.metrics(),
        )

    def chunks(self, index: int, output: RequestOutput) -> Iterator[ChatChunk]:
        """What a new output of conversation `index` adds to the stream."""
        for step in self._turn.steps(index, output):
            if step.is_first:
                yield self._opening_chunk(index, step.number, output)
            if (choice := self._delta(step)) is not None:
                yield self._chunk(choices=[choice], usage=self._meter.of_chunk())

    def last_chunk(self) -> ChatChunk | None:
        """Usage, if it was asked for."""
        return self.end_chunk({}) if self._meter.shows_end else None

    def end_chunk(self, reasons: Mapping[int, FinishReason]) -> ChatChunk:
        """Finish reasons of all choices, and usage: the last frame on a WebSocket."""
        choices = [DeltaChoice(number, Delta(), finish_reason=reasons[number]) for number in sorted(reasons)]
        return self._chunk(choices=choices, usage=self._meter.usage(), metrics=self._meter.metrics())

    def _choice(self, step: Step, role: str, echoed: str) -> ChatChoice:
        return ChatChoice(
            step.number,
            message_of(delta_of(step.events), role, echoed),
            step.logprobs,
            step.finish_reason,
            step.completion.stop_reason,
            self._ids(step.completion),
            step.completion.weight_versions or UNSET,
            written(step.completion.routed_experts) or UNSET,
            self._meter.drafts(step.completion),
        )

    def _opening_chunk(self, index: int, number: int, output: RequestOutput) -> ChatChunk:
        role, echoed = self._openings[index]
        prompt_ids = (output.prompt_token_ids or []) if self._request.return_token_ids else None
        choice = DeltaChoice(number, Delta(role=role, content=echoed))
        num_untold = sum(len(completion.token_ids) for completion in output.outputs)
        usage = self._meter.of_chunk(num_untold)
        return self._chunk(choices=[choice], usage=usage, prompt_token_ids=prompt_ids)

    def _delta(self, step: Step) -> DeltaChoice | None:
        """None when there is nothing to see yet: half a character, or what may become a stop string."""
        ids, reason = self._ids(step.completion), step.finish_reason
        if not (step.events or reason or ids or step.completion.logprobs):
            return None
        stop_reason = UNSET if reason is None else step.completion.stop_reason
        own = step.completion.weight_versions or UNSET, self._meter.drafts(step.completion)
        return DeltaChoice(step.number, delta_of(step.events), step.logprobs, reason, stop_reason, ids, *own)

    def _ids(self, completion: CompletionOutput) -> list[int] | None:
        return list(completion.token_ids) if self._request.return_token_ids else None


def _opening(request: ChatRequest, messages: Sequence[Message], answering: str) -> tuple[str, str]:
    """The role of the answer, and the text it begins with."""
    last = messages[-1]
    continues = request.continue_final_message or request.add_generation_prompt is False
    role = last.get("role") if continues else answering
    content = last.get("content")
    echoes = request.echo and role == last.get("role") and isinstance(content, str)
    return role if isinstance(role, str) else answering, content if echoes else ""  # type: ignore[return-value]


def message_of(turn: Delta, role: str, echoed: str) -> ChatMessage:
    """The whole turn, of which all is new; echoed: what its text begins with."""
    text, thought = echoed + (turn.content or ""), turn.reasoning or None
    calls = [ToolCall(call.id or call_id(), call.function) for call in turn.tool_calls or ()]
    return ChatMessage(
        role,
        text if text or not calls else None,
        tool_calls=calls,
        reasoning=thought,
        reasoning_content=thought,
    )


def delta_of(events: Iterable[Event]) -> Delta:
    """What is new of a turn; an empty text when there is nothing."""
    delta = Delta()
    for event in events:
        match event:
            case Text(text):
                delta.content = (delta.content or "") + text
            case Reasoning(text):
                delta.reasoning = delta.reasoning_content = (delta.reasoning or "") + text
            case CallStart(index, name, given):
                start = ToolCallDelta(index, FunctionCall(name), given or call_id(), "function")
                delta.tool_calls = [*(delta.tool_calls or []), start]
            case CallArguments(index, text):
                _add_arguments(delta, index, text)
    return delta if delta != Delta() else Delta(content="")


def _add_arguments(delta: Delta, index: int, text: str) -> None:
    """To the call's start, if it is in this delta, or as a piece of its own."""
    calls = delta.tool_calls = delta.tool_calls or []
    if not calls or calls[-1].index != index:
        calls.append(ToolCallDelta(index, FunctionCall()))
    calls[-1].function.arguments += text
