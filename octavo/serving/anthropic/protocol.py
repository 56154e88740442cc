"""What a client of Anthropic's may ask: the bodies of /v1/messages and /v1/messages/count_tokens.

`body` fills them, strictly. Fields whose type is Any are taken without an effect.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from octavo.messages.adapters import MOST_SUMMED
from octavo.serving.adapters import LoRAScale
from octavo.serving.openai.protocol import MAX_MESSAGES, MAX_TOOLS, Positive, Seed, StopString

Block = dict[str, Any]
"""Part of a message, told apart by its type; read by `conversation`."""


class Turn(Struct):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class CacheControl(Struct, kw_only=True):
    """Keep the prompt in the prefix cache, for five minutes or an hour after its last use."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


class ClientTool(Struct, kw_only=True):
    """A function that the client runs."""

    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    """custom, the only kind."""
    strict: bool | None = None
    cache_control: CacheControl | None = None


class ToolChoice(Struct, kw_only=True):
    """auto: the model decides; any: one of the tools; tool: the one of this name; none."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, kw_only=True):
    """Whether the answer shows what the model thought."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Positive | None = None
    """The most tokens of it."""
    display: str | None = None
    """omitted: it is not shown after all."""


class OutputFormat(Struct, kw_only=True):
    """The form of the answer."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, kw_only=True):
    """How to answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountTokensRequest(Struct, kw_only=True):
    """POST /v1/messages/count_tokens."""

    messages: Annotated[list[Turn], Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: str | None = None
    system: str | list[Block] | None = None
    tools: Annotated[list[ClientTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    speed: Any = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """POST /v1/messages."""

    max_tokens: Positive
    stream: bool | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=64)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    seed: Seed | None = None
    """octavo's: the same seed, the same answer."""
    lora: Annotated[list[LoRAScale], Meta(max_length=MOST_SUMMED)] | None = None
    """octavo's: adapters to add up, each times its scale."""
    speculative: bool | dict[str, int] | None = None
    """octavo's: False, or {"num_tokens": N}: guess none, or at most N tokens ahead."""
    inference_geo: Any = None
    context_management: Any = None
    diagnostics: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None
