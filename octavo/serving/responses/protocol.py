"""What a client may ask of /v1/responses. `body` fills it, strictly; `conversation` reads what is Any."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from octavo.serving.openai.batch_record import Metadata
from octavo.serving.openai.protocol import MAX_MESSAGES, MAX_TOOLS, Natural, Positive, SamplingFields

Item = dict[str, Any]
"""A message, a call of a function, or its result; told apart by `type`."""
Items = Annotated[list[Item], Meta(min_length=1, max_length=MAX_MESSAGES)]


class TextFormat(Struct, kw_only=True):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextConfig(Struct, omit_defaults=True):
    """About the text of the answer."""

    format: TextFormat | None = None
    verbosity: Any = None
    """A hint to OpenAI's own models."""


class Reasoning(Struct, omit_defaults=True):
    """How much to think."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Any = None
    """Without an effect: thoughts are told whole."""


class CreateResponse(SamplingFields, kw_only=True):
    """POST /v1/responses: OpenAI's fields, and those of sampling."""

    input: str | Items
    instructions: str | None = None
    previous_response_id: str | None = None
    """Go on from there; its instructions do not carry over."""
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Any = None
    """none, auto, required, or {"type": "function", "name": …}."""
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: Positive | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    store: bool | None = None
    """False: the answer cannot be asked for again."""
    background: bool | None = None
    """Answer at once, and work on; needs store."""
    metadata: Metadata | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: list[str] | None = None
    top_logprobs: Natural | None = None
    conversation: Any = None
    prompt: Any = None
    max_tool_calls: Any = None
    enable_response_messages: bool = False
    """Refused when true."""
