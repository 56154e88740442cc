"""What a client of Anthropic's gets: messages, and the events of a stream, one struct each."""

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
    """Tokens; those that were found in the cache are not among input_tokens."""

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


class MessageStart(Struct, tag_field="type", tag="message_start"):
    """The first event; its message is empty."""

    message: Message


class Ping(Struct, tag_field="type", tag="ping"):
    """The server is there."""


class BlockStart(Struct, tag_field="type", tag="content_block_start"):
    """A block begins, empty."""

    index: int
    content_block: Block


class TextDelta(Struct, tag_field="type", tag="text_delta"):
    """More of a text."""

    text: str


class ThinkingDelta(Struct, tag_field="type", tag="thinking_delta"):
    """More of a thought."""

    thinking: str


class SignatureDelta(Struct, tag_field="type", tag="signature_delta"):
    """Ends a thought; octavo signs nothing."""

    signature: str = ""


class InputDelta(Struct, tag_field="type", tag="input_json_delta"):
    """More of a tool's input, as JSON."""

    partial_json: str


Delta = TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockDelta(Struct, tag_field="type", tag="content_block_delta"):
    """More of a block."""

    index: int
    delta: Delta


class BlockStop(Struct, tag_field="type", tag="content_block_stop"):
    """A block is whole."""

    index: int


class Stop(Struct):
    """Why the message ends."""

    stop_reason: StopReason | None
    stop_sequence: str | None


class MessageDelta(Struct, tag_field="type", tag="message_delta"):
    """How the message ends."""

    delta: Stop
    usage: MessageUsage


class MessageStop(Struct, tag_field="type", tag="message_stop"):
    """The last event."""


StreamEvent = MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop


class MessageErrorDetail(Struct):
    """What went wrong."""

    type: str
    message: str


class MessageError(Struct, tag_field="type", tag="error"):
    """The body of every error, and the last event of a stream that fails."""

    error: MessageErrorDetail
