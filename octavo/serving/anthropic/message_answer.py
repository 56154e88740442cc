"""`MessageAnswer`: the model's turn as a message of Anthropic's, whole, and as the events that make it.

Used by `messages`, one per request: the events are told as they come, or nobody is told and the message is
read in the end.
"""

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import msgspec

from octavo.frontend.parsers.events import CallArguments, CallStart, Reasoning, Text
from octavo.serving.anthropic import answers
from octavo.serving.openai.answers import Usage
from octavo.serving.openai.turn import TurnEnd, TurnEvent, TurnStart
from octavo.serving.openai.usage import CacheUse
from octavo.serving.streaming import StreamEvent

_STOP_REASONS: dict[str, answers.StopReason] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "repetition": "end_turn",
}


class MessageAnswer:
    """Fed with all events of a turn, in order."""

    def __init__(self, message_id: str, model: str) -> None:
        self.message = answers.Message(
            id=message_id, model=model, content=[], usage=answers.MessageUsage(0, 0)
        )
        """So far; whole when the turn has ended."""
        self._pieces: list[str] = []
        """Of the last block."""
        self._is_open = False
        """Whether more of that block may come."""

    def take(self, event: TurnEvent) -> Iterator[StreamEvent]:
        """What a stream tells of an event of the turn. To be exhausted."""
        match event:
            case TurnStart(usage, cache):
                self.message.usage = _usage(usage, cache)
                self.message.usage.output_tokens = 0  # none is told yet
                yield {"type": "message_start", "message": self.message}
                yield {"type": "ping"}
            case Text(text):
                yield from self._continue(answers.TextBlock(""))
                yield self._more(text, "text", "text")
            case Reasoning(text):
                yield from self._continue(answers.ThinkingBlock(""))
                yield self._more(text, "thinking", "thinking")
            case CallStart(_, name):
                yield from self._begin(answers.ToolUseBlock(f"toolu_{uuid4().hex[:24]}", name, {}))
            case CallArguments(_, text):
                yield self._more(text, "input_json", "partial_json")
            case TurnEnd():
                yield from self._finish(event)

    def _continue(self, block: answers.Block) -> Iterator[StreamEvent]:
        """Go on with the last block if it is of this kind, else begin this one."""
        if not (self._is_open and type(self.message.content[-1]) is type(block)):
            yield from self._begin(block)

    def _begin(self, block: answers.Block) -> Iterator[StreamEvent]:
        yield from self._close()
        self.message.content.append(block)
        self._is_open = True
        yield self._of_block("start", content_block=block)

    def _more(self, text: str, kind: str, name: str) -> StreamEvent:
        self._pieces.append(text)
        return self._of_block("delta", delta={"type": f"{kind}_delta", name: text})

    def _close(self) -> Iterator[StreamEvent]:
        if not self._is_open:
            return
        text = "".join(self._pieces)
        match self.message.content[-1]:
            case answers.TextBlock() as block:
                block.text = text
            case answers.ThinkingBlock() as block:
                block.thinking = text
                yield self._of_block("delta", delta={"type": "signature_delta", "signature": ""})
            case answers.ToolUseBlock() as block:
                block.input = _object(text)
        yield self._of_block("stop")
        self._pieces, self._is_open = [], False

    def _of_block(self, kind: str, **fields: Any) -> StreamEvent:
        return {"type": f"content_block_{kind}", "index": len(self.message.content) - 1, **fields}

    def _finish(self, end: TurnEnd) -> Iterator[StreamEvent]:
        yield from self._close()
        message = self.message
        message.usage = _usage(end.usage, end.cache)
        message.stop_reason = _STOP_REASONS[end.finish_reason]
        if end.finish_reason == "stop" and isinstance(end.stop_reason, str):
            message.stop_reason, message.stop_sequence = "stop_sequence", end.stop_reason
        reasons = {"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence}
        yield {"type": "message_delta", "delta": reasons, "usage": message.usage}
        yield {"type": "message_stop"}


def _usage(usage: Usage, cache: CacheUse) -> answers.MessageUsage:
    num_others = usage.prompt_tokens - cache.num_read - cache.num_created
    return answers.MessageUsage(num_others, usage.completion_tokens, cache.num_read, cache.num_created)


def _object(text: str) -> dict[str, Any]:
    """A tool's input; empty when the model was cut short in it."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
