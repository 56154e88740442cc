"""What a client gets: one struct per answer and per chunk, encoded as it is. UNSET is left out, None is null.

Names and places follow OpenAI's, then vLLM's. What vLLM always sends is null where there is nothing to say.
"""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.responses import Response

from octavo.frontend.outputs.request_output import RequestSpecDecodeMetrics, WeightVersionSpan
from octavo.version import __version__

Logprobs = dict[str, dict[str, Any]]
"""By token id as text: logprob, rank, decoded_token."""
FinishReason = Literal["stop", "length", "tool_calls", "repetition"]


class PromptTokensDetails(Struct):
    """Where the prompt's tokens came from."""

    cached_tokens: int
    image_tokens: int | UnsetType = UNSET
    """Those that stand for images, if there are some."""
    video_tokens: int | UnsetType = UNSET
    audio_tokens: int | UnsetType = UNSET


class CompletionTokensDetails(Struct):
    """What the answer's tokens were for."""

    reasoning_tokens: int


class Usage(Struct):
    """Tokens of the whole request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


class RequestMetrics(Struct):
    """Latencies of one request, in milliseconds."""

    time_to_first_token_ms: float
    generation_time_ms: float
    queue_time_ms: float
    mean_itl_ms: float | UnsetType
    """Only of two tokens or more."""
    tokens_per_second: float


class CompletionLogprobs(Struct):
    """Of a completion's tokens, in parallel lists; null for the first token of an echoed prompt."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Struct):
    """One completion of one prompt, or what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop string or token that ended it."""
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[Logprobs | None] | None = None
    weight_versions: list[WeightVersionSpan] | UnsetType = UNSET
    """With the end, of an engine whose weights have been replaced: which tokens are by which."""
    routed_experts: str | UnsetType = UNSET
    """With the end, if the engine tells them: the experts of each token, a .npy file in base64."""
    spec_decode_metrics: RequestSpecDecodeMetrics | UnsetType = UNSET
    """With the end, under enable_per_request_metrics, where tokens were guessed ahead."""


class Head(Struct, kw_only=True):
    """Which answer it is; in each of its chunks too."""

    id: str
    created: int
    model: str
    system_fingerprint: str = f"octavo-{__version__}"


class Whole(Head, kw_only=True):
    """What only whole answers say."""

    service_tier: None = None
    kv_transfer_params: dict[str, Any] | None = None


class Completion(Whole, kw_only=True):
    """Answer of /v1/completions, and a chunk of its stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    metrics: RequestMetrics | UnsetType = UNSET


class TopLogprob(Struct):
    """A likely token at one position."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Struct):
    """The chosen token at one position, and the most likely ones."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """Of an answer's tokens."""

    content: list[TokenLogprob]
    refusal: None = None


class FunctionCall(Struct):
    """What is called, and with what; or what is new of it."""

    name: str | UnsetType = UNSET
    arguments: str = ""
    """A JSON text."""


class ToolCall(Struct):
    """One call."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class ChatMessage(Struct):
    """The model's turn."""

    role: str
    content: str | None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: list[ToolCall] = []
    reasoning: str | None = None
    reasoning_content: str | None = None
    """The same under its earlier name."""


class ChatChoice(Struct):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    weight_versions: list[WeightVersionSpan] | UnsetType = UNSET
    routed_experts: str | UnsetType = UNSET
    spec_decode_metrics: RequestSpecDecodeMetrics | UnsetType = UNSET


class ChatCompletion(Whole, kw_only=True):
    """Answer of /v1/chat/completions."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[Logprobs | None] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | UnsetType = UNSET
    metrics: RequestMetrics | UnsetType = UNSET


class ToolCallDelta(Struct, omit_defaults=True):
    """What is new of one call; id and name come first."""

    index: int
    function: FunctionCall
    id: str | None = None
    type: Literal["function"] | None = None


class Delta(Struct, omit_defaults=True):
    """What is new of a message."""

    role: str | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class DeltaChoice(Struct):
    """What is new of one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | None = None
    weight_versions: list[WeightVersionSpan] | UnsetType = UNSET
    spec_decode_metrics: RequestSpecDecodeMetrics | UnsetType = UNSET


class ChatChunk(Head, kw_only=True):
    """A chunk of a chat stream."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[DeltaChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    metrics: RequestMetrics | UnsetType = UNSET


encode = msgspec.json.Encoder().encode


def json_response(answer: Struct, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """An answer in one piece."""
    return Response(encode(answer), status, headers, media_type="application/json")
