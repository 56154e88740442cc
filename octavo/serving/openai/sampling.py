"""`sampling_params`: a request's fields as SamplingParams. The only place where one becomes the other.

What a request leaves open is the model's recommendation (generation_config.json), then octavo's default.
Several answers of a model that is greedy by recommendation are sampled at temperature 1.
"""

from collections.abc import Mapping
from typing import Any

from octavo.base.errors import wrong
from octavo.frontend.requests.response_format import FIELDS, structured_outputs_of
from octavo.messages.sampling import RequestOutputKind, SamplingParams
from octavo.serving.openai.protocol import ChatRequest, CompletionRequest, GenerateRequest, SamplingFields

DEFAULT_COMPLETION_TOKENS = 16
_SAME = tuple(set(SamplingFields.__struct_fields__) & set(SamplingParams.__struct_fields__) - set(FIELDS))
"""Fields that both have under one name and in one form."""


def sampling_params(request: SamplingFields, defaults: Mapping[str, Any]) -> SamplingParams:
    """The parameters of a request. Raises RequestError, which names the field.

    defaults: of InputProcessor.default_sampling_values
    """
    _check_together(request)
    given = {name: getattr(request, name) for name in _SAME}
    values = {**defaults, **{name: value for name, value in given.items() if value is not None}}
    if request.stop_token_ids is not None and (own := defaults.get("stop_token_ids")):
        values["stop_token_ids"] = sorted({*own, *request.stop_token_ids})
    if request.temperature is None and request.use_beam_search:
        values["temperature"] = 0.0
    elif request.temperature is None and max(request.n or 1, request.best_of or 1) > 1:
        values["temperature"] = values.get("temperature") or 1.0
    values["output_kind"] = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    values["structured_outputs"] = structured_outputs_of({name: getattr(request, name) for name in FIELDS})
    values["timeout_s"] = request.timeout
    values["extra_args"] = request.vllm_xargs
    match request:
        case CompletionRequest():
            values |= _of_completion(request)
        case ChatRequest():
            values |= _of_chat(request, defaults.get("max_tokens"))
        case GenerateRequest():
            values["max_tokens"] = request.max_tokens or DEFAULT_COMPLETION_TOKENS
    return SamplingParams(**values)


def tokenization(request: SamplingFields, *, add_special_tokens: bool) -> dict[str, Any]:
    """How the prompts are tokenized; add_special_tokens: unless the request says otherwise."""
    wanted = request.add_special_tokens
    options: dict[str, Any] = {"add_special_tokens": add_special_tokens if wanted is None else wanted}
    if request.truncate_prompt_tokens is not None:
        options["truncate_prompt_tokens"] = request.truncate_prompt_tokens
    if request.truncation_side is not None:
        options["truncation_side"] = request.truncation_side
    return options | {"max_output_tokens": _asked_tokens(request) or 0}


def _asked_tokens(request: SamplingFields) -> int | None:
    most: int | None = getattr(request, "max_completion_tokens", None)
    return getattr(request, "max_tokens", None) if most is None else most


def _check_together(request: SamplingFields) -> None:
    if request.stream_options is not None and not request.stream:
        raise wrong("stream_options", "can only be set when stream is true")
    if request.logprob_token_ids is not None and request.use_beam_search:
        raise wrong("logprob_token_ids", "do not go with beam search")
    if request.prompt_logprobs is not None and request.stream:
        raise wrong("prompt_logprobs", "are not available when stream is true")


def _of_completion(request: CompletionRequest) -> dict[str, Any]:
    max_tokens = request.max_tokens
    if max_tokens == 0 and not request.echo:
        raise wrong("max_tokens", "must be at least 1; 0 needs echo, to score the prompt")
    if max_tokens == 0 and request.logprob_token_ids is not None:
        raise wrong("logprob_token_ids", "need max_tokens of 1 at least")
    prompt_logprobs = request.prompt_logprobs
    if request.echo and prompt_logprobs is None:
        prompt_logprobs = request.logprobs
    if max_tokens is None:
        max_tokens = DEFAULT_COMPLETION_TOKENS
    return {
        "max_tokens": max(1, max_tokens),
        "min_tokens": request.min_tokens or 0,
        "logprobs": request.logprobs if request.logprob_token_ids is None else None,
        "prompt_logprobs": prompt_logprobs,
    }


def _of_chat(request: ChatRequest, recommended: int | None) -> dict[str, Any]:
    if request.top_logprobs is not None and not request.logprobs:
        raise wrong("top_logprobs", "needs logprobs to be true")
    max_tokens = _asked_tokens(request)
    return {
        "max_tokens": recommended if max_tokens is None else max_tokens,
        "logprobs": _num_logprobs(request),
    }


def _num_logprobs(request: ChatRequest) -> int | None:
    """None also where logprob_token_ids say which ones."""
    if request.logprob_token_ids is not None:
        return None
    return (request.top_logprobs or 0) if request.logprobs else None
