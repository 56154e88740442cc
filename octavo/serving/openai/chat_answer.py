"""`ChatAnswer`: what the engine brings, as chat.completion objects: the one place where they are made.

Used by the routes of chat, whole or streamed, over HTTP or WebSocket. It keeps what a stream must remember.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from msgspec import UNSET, UnsetType

from octavo.frontend.outputs import CompletionOutput, RequestOutput
from octavo.frontend.parsers.answer import AnswerParser
from octavo.frontend.parsers.events import Event, Reasoning, Text, coalesced
from octavo.serving.caller import Caller
from octavo.serving.openai.answers import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    Delta,
    DeltaChoice,
    FinishReason,
    TokenLogprob,
    Usage,
)
from octavo.serving.openai.fingerprint import FINGERPRINT
from octavo.serving.openai.logprobs import LogprobWriter, prompt_logprobs
from octavo.serving.openai.messages import delta_of, message_of
from octavo.serving.openai.protocol import ChatRequest, Message
from octavo.serving.openai.usage import Meter


class ChatAnswer:
    """The answer to one request, of one conversation or several."""

    def __init__(
        self,
        caller: Caller,
        request: ChatRequest,
        conversations: Sequence[Sequence[Message]],
        answer_id: str,
        model: str,
        reader: Callable[[str], AnswerParser | None],
    ) -> None:
        """reader: makes the parser of an answer to a prompt."""
        self._reader = reader
        self._parsers: dict[int, AnswerParser | None] = {}
        """By choice."""
        self._shows_reasoning = request.include_reasoning is not False
        self._id = answer_id
        self._model = model
        self._meter = Meter(request, caller.config)
        self._request = request
        self._created = int(time.time())
        self._chunk = partial(
            ChatChunk,
            id=answer_id,
            created=self._created,
            model=model,
            system_fingerprint=FINGERPRINT,
        )
        role = caller.config.response_role
        self._openings = [_opening(request, messages, role) for messages in conversations]
        self._logprobs: LogprobWriter | None = None
        if request.logprobs or request.logprob_token_ids is not None:
            self._logprobs = LogprobWriter(
                caller.engine.tokenizer,
                request.top_logprobs or 0,
                request.logprob_token_ids,
                as_ids=bool(request.return_tokens_as_token_ids or caller.config.return_tokens_as_token_ids),
            )
        self._begun: set[int] = set()
        """Choices that have their role."""

    def whole(self, outputs: Sequence[RequestOutput]) -> ChatCompletion:
        """The answer, from the last outputs of all conversations."""
        for index, output in enumerate(outputs):
            self._meter.count(index, output)
        request, first = self._request, outputs[0]
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[
                self._choice(index, output, completion)
                for index, output in enumerate(outputs)
                for completion in output.outputs
            ],
            usage=self._meter.usage(),
            system_fingerprint=FINGERPRINT,
            prompt_logprobs=prompt_logprobs(first.prompt_logprobs) if first.prompt_logprobs else UNSET,
            prompt_token_ids=(first.prompt_token_ids or []) if request.return_token_ids else UNSET,
            prompt_text=(first.prompt or "") if request.return_prompt_text else UNSET,
            metrics=self._meter.metrics(),
        )

    def chunks(self, index: int, output: RequestOutput) -> Iterator[ChatChunk]:
        """What a new output of conversation `index` adds to the stream."""
        self._meter.count(index, output)
        for completion in output.outputs:
            number = self._number(index, completion)
            if number not in self._begun:
                self._begun.add(number)
                yield self._opening_chunk(index, number, output)
            events = self.read(index, output, completion)
            if (choice := self._delta(index, completion, events)) is not None:
                yield self._chunk(choices=[choice], usage=self._meter.of_chunk())

    def read(self, index: int, output: RequestOutput, completion: CompletionOutput) -> list[Event]:
        """What the new text of a choice of conversation `index` says; what was held back comes at its end."""
        number = self._number(index, completion)
        if number not in self._parsers:
            self._parsers[number] = self._reader(output.prompt or "")
        parser = self._parsers[number]
        if parser is None:
            return [Text(completion.text)] if completion.text else []
        events = parser.feed(completion.text)
        if completion.finish_reason is not None:
            events = coalesced(events + parser.finish())
        if self._shows_reasoning:
            return events
        return [event for event in events if not isinstance(event, Reasoning)]

    def finish_reason(self, index: int, completion: CompletionOutput) -> FinishReason | None:
        """Why the choice ended; the same whether it was streamed or not."""
        reason: FinishReason | None = completion.finish_reason  # type: ignore[assignment]  # others are errors
        parser = self._parsers.get(self._number(index, completion))
        return "tool_calls" if reason == "stop" and parser is not None and parser.num_calls else reason

    def count(self, index: int, output: RequestOutput) -> None:
        """Add an output to the usage, for who does not ask for chunks."""
        self._meter.count(index, output)

    def usage(self) -> Usage:
        """Tokens so far."""
        return self._meter.usage()

    def logprobs(self, completion: CompletionOutput) -> list[TokenLogprob]:
        """Of an output's tokens, if they were asked for."""
        written = self._written_logprobs(completion)
        return [] if written is None else written.content

    def last_chunk(self) -> ChatChunk | None:
        """Usage, if it was asked for."""
        if not self._meter.shows_end:
            return None
        return self._chunk(choices=[], usage=self._meter.usage(), metrics=self._meter.metrics())

    def end_chunk(self, reasons: Mapping[int, FinishReason]) -> ChatChunk:
        """Finish reasons of all choices, and usage: the last frame on a WebSocket."""
        choices = [DeltaChoice(number, Delta(), finish_reason=reasons[number]) for number in sorted(reasons)]
        return self._chunk(choices=choices, usage=self._meter.usage(), metrics=self._meter.metrics())

    def _number(self, index: int, completion: CompletionOutput) -> int:
        return index * (self._request.n or 1) + completion.index

    def _choice(self, index: int, output: RequestOutput, completion: CompletionOutput) -> ChatChoice:
        events = self.read(index, output, completion)
        return ChatChoice(
            self._number(index, completion),
            message_of(events, *self._openings[index]),
            self._written_logprobs(completion),
            self.finish_reason(index, completion),
            completion.stop_reason,
            self._ids(completion),
        )

    def _opening_chunk(self, index: int, number: int, output: RequestOutput) -> ChatChunk:
        role, echoed = self._openings[index]
        prompt_ids = (output.prompt_token_ids or []) if self._request.return_token_ids else UNSET
        choice = DeltaChoice(number, Delta(role=role, content=echoed))
        return self._chunk(choices=[choice], usage=self._meter.of_chunk(), prompt_token_ids=prompt_ids)

    def _delta(self, index: int, completion: CompletionOutput, events: list[Event]) -> DeltaChoice | None:
        """None when there is nothing to see yet: half a character, or what may become a stop string."""
        ids, reason = self._ids(completion), self.finish_reason(index, completion)
        if not (events or reason or ids or completion.logprobs):
            return None
        return DeltaChoice(
            self._number(index, completion),
            delta_of(events),
            self._written_logprobs(completion),
            reason,
            UNSET if reason is None else completion.stop_reason,
            ids,
        )

    def _ids(self, completion: CompletionOutput) -> list[int] | UnsetType:
        return list(completion.token_ids) if self._request.return_token_ids else UNSET

    def _written_logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        if self._logprobs is None or completion.logprobs is None:
            return None
        return self._logprobs.chat(completion.token_ids, completion.logprobs)


def _opening(request: ChatRequest, messages: Sequence[Message], answering: str) -> tuple[str, str]:
    """The role of the answer, and the text it begins with."""
    last = messages[-1]
    continues = request.continue_final_message or request.add_generation_prompt is False
    role = last.get("role") if continues else answering
    content = last.get("content")
    echoes = request.echo and role == last.get("role") and isinstance(content, str)
    return role if isinstance(role, str) else answering, content if echoes else ""  # type: ignore[return-value]
