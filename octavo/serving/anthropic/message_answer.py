"""`MessageAnswer`: the model's turn as a message of Anthropic's, whole, and as the events that make it.

Used by `messages`, one per request: the events are told as they come, or nobody is told and the message is
read in the end.
"""

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import msgspec
from msgspec import UNSET

from octavo.frontend.parsers.events import CallArguments, CallStart, Reasoning, Text
from octavo.serving.anthropic import answers
from octavo.serving.anthropic.answers import (
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    Delta,
    InputDelta,
    Message,
    MessageDelta,
    MessageStart,
    MessageStop,
    Ping,
    SignatureDelta,
    Stop,
    StopReason,
    StreamEvent,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from octavo.serving.openai.answers import Usage
from octavo.serving.openai.turn import TurnEnd, TurnEvent, TurnStart

_STOP_REASONS: dict[str, StopReason] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "repetition": "end_turn",
}


class MessageAnswer:
    """Fed with all events of a turn, in order."""

    def __init__(self, message_id: str, model: str) -> None:
        self.message = Message(id=message_id, model=model, content=[], usage=answers.MessageUsage(0, 0))
        """So far; whole when the turn has ended."""
        self._pieces: list[str] = []
        """Of the last block."""
        self._is_open = False
        """Whether more of that block may come."""

    def take(self, event: TurnEvent) -> Iterator[StreamEvent]:
        """What a stream tells of an event of the turn. To be exhausted."""
        match event:
            case TurnStart(usage):
                self.message.usage = _usage(usage)
                yield MessageStart(self.message)
                yield Ping()
            case Text(text):
                yield from self._continue(TextBlock(""))
                yield self._more(text, TextDelta(text))
            case Reasoning(text):
                yield from self._continue(ThinkingBlock(""))
                yield self._more(text, ThinkingDelta(text))
            case CallStart(_, name):
                yield from self._begin(ToolUseBlock(f"toolu_{uuid4().hex[:24]}", name, {}))
            case CallArguments(_, text):
                yield self._more(text, InputDelta(text))
            case TurnEnd():
                yield from self._finish(event)

    def _continue(self, block: Block) -> Iterator[StreamEvent]:
        """Go on with the last block if it is of this kind, else begin this one."""
        if not (self._is_open and type(self.message.content[-1]) is type(block)):
            yield from self._begin(block)

    def _begin(self, block: Block) -> Iterator[StreamEvent]:
        yield from self._close()
        yield BlockStart(len(self.message.content), block)
        self.message.content.append(block)
        self._is_open = True

    def _more(self, text: str, delta: Delta) -> BlockDelta:
        self._pieces.append(text)
        return BlockDelta(len(self.message.content) - 1, delta)

    def _close(self) -> Iterator[StreamEvent]:
        """The last block is whole."""
        if not self._is_open:
            return
        index, text = len(self.message.content) - 1, "".join(self._pieces)
        match self.message.content[-1]:
            case TextBlock() as block:
                block.text = text
            case ThinkingBlock() as block:
                block.thinking = text
                yield BlockDelta(index, SignatureDelta())
            case ToolUseBlock() as block:
                block.input = _object(text)
        yield BlockStop(index)
        self._pieces, self._is_open = [], False

    def _finish(self, end: TurnEnd) -> Iterator[StreamEvent]:
        yield from self._close()
        message = self.message
        message.usage = _usage(end.usage)
        message.stop_reason = _STOP_REASONS[end.finish_reason]
        if end.finish_reason == "stop" and isinstance(end.stop_reason, str):
            message.stop_reason, message.stop_sequence = "stop_sequence", end.stop_reason
        yield MessageDelta(Stop(message.stop_reason, message.stop_sequence), message.usage)
        yield MessageStop()


def _usage(usage: Usage) -> answers.MessageUsage:
    details = usage.prompt_tokens_details
    num_cached = 0 if details is UNSET else details.cached_tokens
    return answers.MessageUsage(usage.prompt_tokens - num_cached, usage.completion_tokens, num_cached)


def _object(text: str) -> dict[str, Any]:
    """A tool's input; empty when the model was cut short in it."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
