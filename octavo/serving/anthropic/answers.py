"""What a client of Anthropic's gets in one piece; `message_answer` makes the events of a stream."""

from typing import Any, Literal

from msgspec import Struct

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextBlock(Struct, tag_field="type", tag="text"):
    """What the model says."""

    text: str


class ThinkingBlock(Struct, tag_field="type", tag="thinking"):
    """What it thought before."""

    thinking: str
    signature: str = ""


class ToolUseBlock(Struct, tag_field="type", tag="tool_use"):
    """A tool that it calls."""

    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(Struct):
    """Tokens; those that were found in the cache or left there are not among input_tokens."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class Message(Struct, kw_only=True, tag_field="type", tag="message"):
    """Answer of /v1/messages."""

    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Block]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class TokenCount(Struct):
    """Answer of /v1/messages/count_tokens."""

    input_tokens: int


class MessageErrorDetail(Struct):
    """What went wrong."""

    type: str
    message: str


class MessageError(Struct):
    """The body of every error."""

    error: MessageErrorDetail
    type: Literal["error"] = "error"
