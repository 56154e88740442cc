"""What a client of /v1/responses gets: responses and their items. `response_answer` makes the events."""

from typing import Any, Literal

from msgspec import Struct

from octavo.serving.openai.answers import CompletionTokensDetails, PromptTokensDetails, TokenLogprob
from octavo.serving.responses.protocol import Reasoning, TextConfig

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(Struct, tag_field="type", tag="output_text"):
    """A text of a message."""

    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    """A thought."""

    text: str


class MessageItem(Struct, kw_only=True, tag_field="type", tag="message"):
    """What the model says."""

    id: str
    status: ItemStatus = "in_progress"
    role: Literal["assistant"] = "assistant"
    content: list[OutputText] = []


class ReasoningItem(Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """What it thought before."""

    id: str
    status: ItemStatus = "in_progress"
    summary: list[Any] = []
    content: list[ReasoningText] = []
    encrypted_content: str | None = None


class CallItem(Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A function that it calls."""

    id: str
    status: ItemStatus = "in_progress"
    call_id: str
    name: str
    arguments: str = ""
    """JSON."""


OutputItem = MessageItem | ReasoningItem | CallItem
Part = OutputText | ReasoningText


class ResponseUsage(Struct):
    """Tokens of the whole request."""

    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: CompletionTokensDetails
    total_tokens: int


class Fault(Struct):
    """Why a response failed."""

    message: str
    code: str = "server_error"


class IncompleteDetails(Struct):
    """Why a response ends early."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class Response(Struct, kw_only=True):
    """One answer, and how it was asked for."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status = "in_progress"
    background: bool = False
    error: Fault | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = {}
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: Reasoning | None = None
    store: bool = True
    temperature: float | None = None
    text: TextConfig | None = None
    tool_choice: Any = "auto"
    tools: list[dict[str, Any]] = []
    top_logprobs: int | None = None
    top_p: float | None = None
    truncation: Literal["auto", "disabled"] = "disabled"
    usage: ResponseUsage | None = None
