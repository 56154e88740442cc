"""`ResponseAnswer`: the model's turn as the items of a response, whole, and as the events that make them.

Used by the routes of `responses`, one per request: the events are told as they come, or nobody is told and
the response is read in the end.
"""

import time
from collections.abc import Iterator
from itertools import count
from typing import Any
from uuid import uuid4

from octavo.frontend.parsers.events import CallArguments, CallStart, Reasoning, Text
from octavo.serving.errors import http_error, message_of
from octavo.serving.openai.answers import CompletionTokensDetails, PromptTokensDetails, TokenLogprob
from octavo.serving.openai.tools import call_id
from octavo.serving.openai.turn import TextLogprobs, TurnEnd, TurnEvent, TurnStart
from octavo.serving.responses import answers
from octavo.serving.streaming import StreamEvent

_TEXT, _THOUGHT = "output_text", "reasoning_text"


class ResponseAnswer:
    """Fed with all events of a turn, in order."""

    def __init__(self, response: answers.Response) -> None:
        self.response = response
        """So far; whole when the turn has ended."""
        self._pieces: list[str] = []
        """Of the last item."""
        self._logprobs: list[TokenLogprob] = []
        """Of its text."""
        self._next_logprobs: list[TokenLogprob] = []
        """Of the text that comes next."""
        self._is_open = False
        """Whether more of that item may come."""
        self._numbers = count()

    def take(self, event: TurnEvent) -> Iterator[StreamEvent]:
        """What a stream tells of an event of the turn, before `told_end`. To be exhausted."""
        match event:
            case TurnStart():
                self.response.status = "in_progress"
                yield self._event("created", response=self.response)
                yield self._event("in_progress", response=self.response)
            case Text(text):
                if not self._goes_on(answers.MessageItem):
                    yield from self._begin(
                        answers.MessageItem(id=_new_id("msg"), content=[]), answers.OutputText("")
                    )
                yield self._text_delta(_TEXT, text)
            case TextLogprobs(entries):
                self._next_logprobs = entries
            case Reasoning(text):
                if not self._goes_on(answers.ReasoningItem):
                    yield from self._begin(
                        answers.ReasoningItem(id=_new_id("rs"), content=[]), answers.ReasoningText("")
                    )
                yield self._text_delta(_THOUGHT, text)
            case CallStart(_, name, given):
                yield from self._begin(
                    answers.CallItem(id=_new_id("fc"), call_id=given or call_id(), name=name)
                )
            case CallArguments(_, text):
                self._pieces.append(text)
                yield self._in_item("function_call_arguments.delta", delta=text)
            case TurnEnd():
                self._settle(event)
                yield from self._close()

    def told_end(self) -> StreamEvent:
        """The last event of a stream: the whole response."""
        return self._event(self.response.status, response=self.response)

    def fail(self, error: BaseException) -> Iterator[StreamEvent]:
        """The response ends here: what a stream tells before `told_end`. To be exhausted."""
        self.response.status = "failed"
        self.response.error = answers.Fault(message_of(http_error(error)))
        self._cut()
        yield from self._close()

    def _goes_on(self, kind: type[answers.OutputItem]) -> bool:
        return self._is_open and isinstance(self.response.output[-1], kind)

    def _begin(self, item: answers.OutputItem, part: answers.Part | None = None) -> Iterator[StreamEvent]:
        yield from self._close()
        self.response.output.append(item)
        self._is_open = True
        yield self._item("added")
        if part is not None:
            yield self._in_item("content_part.added", content_index=0, part=part)
            item.content.append(part)  # type: ignore[union-attr, arg-type]  # calls have no parts

    def _close(self) -> Iterator[StreamEvent]:
        if not self._is_open:
            return
        text, item = "".join(self._pieces), self.response.output[-1]
        self._pieces, self._is_open = [], False
        if item.status == "in_progress":
            item.status = "completed"
        if isinstance(item, answers.CallItem):
            item.arguments = text
            yield self._in_item("function_call_arguments.done", name=item.name, arguments=text)
        else:
            part, logprobs = item.content[0], self._logprobs
            part.text, self._logprobs = text, []
            if isinstance(part, answers.OutputText):
                part.logprobs = logprobs
            kind = _TEXT if isinstance(item, answers.MessageItem) else _THOUGHT
            yield self._in_item(f"{kind}.done", content_index=0, text=text, logprobs=logprobs)
            yield self._in_item("content_part.done", content_index=0, part=part)
        yield self._item("done")

    def _cut(self) -> None:
        """The last item will not be whole, if it is not yet."""
        if self._is_open:
            self.response.output[-1].status = "incomplete"

    def _settle(self, end: TurnEnd) -> None:
        response, usage = self.response, end.usage
        status: answers.Status = "incomplete" if end.finish_reason == "length" else "completed"
        response.status = status
        response.completed_at = int(time.time())
        if status == "incomplete":
            response.incomplete_details = answers.IncompleteDetails()
            self._cut()
        response.usage = answers.ResponseUsage(
            usage.prompt_tokens,
            usage.prompt_tokens_details or PromptTokensDetails(0),
            usage.completion_tokens,
            usage.completion_tokens_details or CompletionTokensDetails(0),
            usage.total_tokens,
        )

    def _text_delta(self, kind: str, text: str) -> StreamEvent:
        logprobs, self._next_logprobs = self._next_logprobs, []
        self._pieces.append(text)
        self._logprobs += logprobs
        return self._in_item(f"{kind}.delta", content_index=0, delta=text, logprobs=logprobs)

    def _item(self, kind: str) -> StreamEvent:
        index = len(self.response.output) - 1
        return self._event(f"output_item.{kind}", output_index=index, item=self.response.output[index])

    def _in_item(self, kind: str, **fields: Any) -> StreamEvent:
        index = len(self.response.output) - 1
        return self._event(kind, item_id=self.response.output[index].id, output_index=index, **fields)

    def _event(self, kind: str, **fields: Any) -> StreamEvent:
        return {"type": f"response.{kind}", "sequence_number": next(self._numbers), **fields}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid4().hex}"
