"""What a client may ask: one struct per request body. `body` fills them, strictly; null means "not given".

Ranges are here for the documentation and for a quick answer; the rules that join fields, and those that need
the model, are SamplingParams' and the input processor's. Names follow OpenAI's, then vLLM's.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from octavo.messages.adapters import MOST_SUMMED
from octavo.messages.sampling import MAX_N, RepetitionDetectionParams
from octavo.serving.adapters import LoRAScale

MAX_PROMPTS = 1024
MAX_MESSAGES = 4096
MAX_TOOLS = 1024
_MAX_INT = 2**63 - 1
Positive = Annotated[int, Meta(ge=1, le=_MAX_INT)]
Natural = Annotated[int, Meta(ge=0, le=_MAX_INT)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Seed = Annotated[int, Meta(ge=-(2**63), le=_MAX_INT)]
Seconds = Annotated[float, Meta(gt=0)]
TokenId = Annotated[int, Meta(ge=0, le=_MAX_INT)]
TokenIds = Annotated[list[TokenId], Meta(max_length=2**17)]
Text = Annotated[str, Meta(min_length=1)]
StopString = Annotated[str, Meta(min_length=1, max_length=4096)]
Scalar = str | bool | float | Annotated[int, Meta(ge=-(2**63), le=_MAX_INT)]
Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Count = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
"""A number of logprobs; -1 = the vocabulary."""
_IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT_SCHEMA = {"type": "string", "minLength": 1}
_SEVERAL = {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS}
Prompt = Annotated[
    Any,
    Meta(
        extra_json_schema={
            "anyOf": [
                _TEXT_SCHEMA,
                {**_SEVERAL, "items": _TEXT_SCHEMA},
                _IDS_SCHEMA,
                {**_SEVERAL, "items": _IDS_SCHEMA},
                {"type": "null"},
            ]
        }
    ),
]
"""A text, token ids, or a list of either; read by `prompts`."""
_PART_SCHEMA = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
Message = Annotated[
    dict[str, Any],
    Meta(
        extra_json_schema={
            "properties": {
                "role": {"type": "string"},
                "content": {
                    "anyOf": [{"type": "string"}, {"type": "array", "items": _PART_SCHEMA}, {"type": "null"}]
                },
            },
            "required": ["role"],
        }
    ),
]
"""One turn; checked by the chat template, which may read more of it than role and content."""
Messages = Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]


class StreamOptions(Struct, forbid_unknown_fields=True):
    """What a stream tells besides the text."""

    include_usage: bool | None = None
    """Usage in a last chunk without choices."""
    continuous_usage_stats: bool | None = None
    """With include_usage: usage so far in every chunk."""
    include_obfuscation: bool | None = None
    """Of OpenAI, without an effect: nothing is padded."""


_FORMAT_SCHEMA = {
    "properties": {"type": {"enum": ["text", "json_object", "json_schema", "structural_tag"]}},
    "required": ["type"],
}


class RequestFields(Struct, kw_only=True):
    """What all requests have in common, for text or to pooling models."""

    model: str | None = None
    """Name of the model; the served one if it is left out."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its own; in chat the template has written them already."""
    truncate_prompt_tokens: Count | None = None
    """Keep so many tokens of a text; -1 = as many as the model takes."""
    truncation_side: Literal["left", "right"] | None = None
    """The side that is cut off."""
    priority: Priority | None = None
    retention_s: Seconds | None = None
    """Seconds that the prompt stays in the prefix cache after its last use."""
    prefix_priority: Annotated[int, Meta(ge=0, le=99)] | None = None
    """Where not all such prompts can stay, the least goes first."""
    deadline_s: Seconds | None = None
    """Seconds in which the answer is wanted, for the scheduling policy "deadline"."""
    request_id: Annotated[str, Meta(min_length=1, max_length=128, pattern="^[!-~]*$")] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    """Only prompts of the same salt share cached blocks."""
    lora: Annotated[list[LoRAScale], Meta(max_length=MOST_SUMMED)] | None = None
    """Adapters to add up, each times its scale; [] = the base model alone."""


class SamplingFields(RequestFields, kw_only=True):
    """What all requests for text have in common. Names that SamplingParams has mean the same there."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=_MAX_INT)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    seed: Seed | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=64)] | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Natural | None = None
    bad_words: Annotated[list[Text], Meta(max_length=128)] | None = None
    logit_bias: Annotated[dict[str, float], Meta(max_length=10_000)] | None = None
    """By token id; clamped to -100 … 100."""
    allowed_token_ids: TokenIds | None = None
    forbidden_token_ids: TokenIds | None = None
    prompt_logprobs: Count | None = None
    logprob_token_ids: TokenIds | None = None
    routed_experts_prompt_start: Natural | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    num_beam_groups: Positive | None = None
    diversity_penalty: Annotated[float, Meta(ge=0)] | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    stream_interval: Positive | None = None
    thinking_token_budget: Count | None = None
    """Tokens of reasoning after which the answer must begin; -1 = any number."""
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    response_format: Annotated[dict[str, Any], Meta(extra_json_schema=_FORMAT_SCHEMA)] | None = None
    """text, json_object, json_schema or structural_tag; read by requests/response_format, as the next."""
    structured_outputs: dict[str, Any] | None = None
    """One of json, json_object, regex, choice, grammar, structural_tag."""
    guided_json: dict[str, Any] | str | bool | None = None
    """As `structured_outputs` under the names before it; so all of guided_*."""
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    guided_decoding_backend: str | None = None
    guided_whitespace_pattern: str | None = None
    timeout: Seconds | None = None
    """Seconds from the arrival after which the request fails with 504."""
    speculative: bool | dict[str, int] | None = None
    """False, or {"num_tokens": N}: guess none, or at most N tokens ahead; the text is the same."""
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """Logprobs name tokens as token_id:N."""
    vllm_xargs: dict[str, Scalar | list[Scalar]] | None = None
    """For custom logits processors."""
    kv_transfer_params: dict[str, Any] | None = None
    """Where another engine has computed the prompt, or that one goes on with it."""


class CompletionRequest(SamplingFields, kw_only=True):
    """POST /v1/completions."""

    prompt: Prompt = None
    suffix: str | None = None
    """What follows the completion, for models with tokens to fill in the middle; see `infill`."""
    prompt_embeds: str | Annotated[list[str], Meta(max_length=MAX_PROMPTS)] | None = None
    """Base64 of one tensor [num_tokens, hidden_size], as safetensors or torch.save write it; or a list."""
    max_tokens: Natural | None = None
    """16 if left out; 0 only with echo, to score the prompt."""
    logprobs: Count | None = None
    echo: bool | None = None


class GenerateRequest(SamplingFields, kw_only=True):
    """POST /generate and /generate_stream: one prompt and the fields of sampling, nothing of OpenAI's."""

    prompt: Text | Annotated[list[TokenId], Meta(min_length=1)]
    max_tokens: Positive | None = None
    """16 if left out."""


class Function(Struct):
    """What a model may call."""

    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema of an object."""
    strict: bool | None = None
    """Hold calls to `parameters` that the model need not make; see `strict_calls`. Forced ones always are."""


class Tool(Struct):
    """A function, the only kind of tool."""

    function: Function
    type: Literal["function"] = "function"


class NamedFunction(Struct):
    """The name of a tool."""

    name: str


class NamedTool(Struct):
    """The tool that must be called."""

    function: NamedFunction
    type: Literal["function"] = "function"


class ChatRequest(SamplingFields, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Messages
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    """The rest of the context if both are left out."""
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    echo: bool | None = None
    """Begin the answer with the last message."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the template; only those that it reads."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """A variable of the template; none: without thinking (`enable_thinking`), all others: with it."""
    return_prompt_text: bool | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    """auto if there are tools."""
    parallel_tool_calls: bool | None = None
    """False: one call at most, where calls are forced."""
    include_reasoning: bool | None = None
    """False: the reasoning is left out of the answer."""
    mm_processor_kwargs: dict[str, Any] | None = None
    """Entries that replace those of the model's preprocessor_config.json."""
    media_io_kwargs: dict[str, dict[str, Any]] | None = None
    """By modality; of videos num_frames and fps."""


class BatchChatRequest(ChatRequest, kw_only=True):
    """POST /v1/chat/completions/batch: several conversations, one choice for each."""

    messages: Annotated[list[Messages], Meta(min_length=1, max_length=MAX_PROMPTS)]  # type: ignore[assignment]


class TokenizeRequest(Struct, kw_only=True):
    """POST /tokenize: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[TokenId]
    model: str | None = None
