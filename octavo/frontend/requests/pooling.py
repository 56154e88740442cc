"""What a request to a pooling model may ask, and how its text becomes tokens.

Called by the input processor. Texts of errors follow vLLM's.
"""

from dataclasses import replace
from typing import NamedTuple

import msgspec

from octavo.base.errors import RequestError, wrong
from octavo.config.engine import EngineConfig
from octavo.config.pooling import PoolingConfig
from octavo.frontend.requests.options import TokenizationOptions
from octavo.frontend.requests.prompts import ParsedPrompt
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.messages.pooling import PoolingParams
from octavo.messages.sampling import RequestOutputKind, SamplingParams

NO_SAMPLING = SamplingParams(max_tokens=1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
"""How many tokens a request to a pooling model samples is nobody's choice: its answer is one result."""
_NOT_POOLING = (
    "LLM.encode() is only supported for pooling models. Try passing `--runner pooling` to use the model as a "
    "pooling model."
)
_APIS = {
    "embed": (
        "Embedding API is not supported by this model. Try converting the model using `--convert embed`."
    ),
    "classify": (
        "Classification API is not supported by this model. Try converting the model using "
        "`--convert classify`."
    ),
}


def resolve_pooling(params: PoolingParams, config: EngineConfig) -> PoolingParams:
    """Return the params with the task decided. Raises RequestError for what the model cannot do."""
    pooling = config.pooling
    if pooling is None:
        raise RequestError(_NOT_POOLING, "task")
    task = params.task or pooling.tasks[0]
    if task not in pooling.tasks:
        known = f"Unsupported task: {task!r}. Supported tasks: {', '.join(pooling.tasks)}."
        raise RequestError(_APIS.get(task, known), "task")
    if params.late_interaction_params is not None and task != "token_embed":
        raise wrong("late_interaction_params", f"is for task token_embed, not {task}")
    if params.dimensions is not None:
        _check_dimensions(params.dimensions, config)
    return msgspec.structs.replace(params, task=task)


def as_trained(prompt: ParsedPrompt, pooling: PoolingConfig | None) -> ParsedPrompt:
    """Return a text, or an image alone, as the model was asked in training. Raises RequestError."""
    assert pooling is not None
    if prompt.media is None:
        if prompt.token_ids is not None or prompt.text is None or pooling.text_form == "{}":
            return prompt
        return replace(prompt, text=pooling.text_form.replace("{}", prompt.text))
    if not prompt.text and not prompt.token_ids:
        alone = {"token_ids": [0]} if pooling.is_contrastive else {"text": pooling.image_form}
        return replace(prompt, **alone)
    if pooling.is_contrastive:
        raise RequestError(
            "This model embeds a text or an image, not both: give an empty prompt beside an image.", "prompt"
        )
    return prompt


def _check_dimensions(asked: int, config: EngineConfig) -> None:
    pooling, name = config.pooling, config.served_names[0]
    assert pooling is not None
    if not pooling.is_embedder:
        raise wrong("dimensions", "is for embeddings; this model has labels")
    if asked == pooling.embedding_size:
        return
    if pooling.dimensions is None:
        raise RequestError(
            f'Model "{name}" does not support matryoshka representation, changing output dimensions will '
            "lead to poor results.",
            "dimensions",
        )
    if pooling.dimensions and asked not in pooling.dimensions:
        raise RequestError(
            f'Model "{name}" only supports {list(pooling.dimensions)} matryoshka dimensions, use other '
            "output dimensions will lead to poor results.",
            "dimensions",
        )
    if asked > pooling.embedding_size:
        raise RequestError(
            f'Model "{name}" only supports matryoshka dimensions in range [1, {pooling.embedding_size}], got '
            f"{asked}.",
            "dimensions",
        )


class PoolingPrompt(NamedTuple):
    """A prompt as tokens. pair_start, num_instruction_tokens: as in RequestSpec"""

    ids: list[int]
    pair_start: int = 0
    num_instruction_tokens: int = 0


def encode_prompt(
    prompt: ParsedPrompt,
    options: TokenizationOptions,
    tokenizer: Tokenizer | None,
    most: int,
    pooling: PoolingConfig | None = None,
) -> PoolingPrompt:
    """Return the tokens, cut to what the options allow; special tokens stay. Raises RequestError.

    most: tokens that the model takes; pooling: how texts are filled up
    """
    found = _encode(prompt, options, tokenizer, most)
    length, token = (0, 0) if pooling is None else pooling.padded_to
    num_missing = length - len(found.ids)
    if num_missing <= 0 or prompt.media is not None:
        return found
    return found._replace(ids=found.ids + [token] * num_missing)


def _encode(
    prompt: ParsedPrompt, options: TokenizationOptions, tokenizer: Tokenizer | None, most: int
) -> PoolingPrompt:
    keep = options.truncate_prompt_tokens
    if keep is not None and keep > most:
        raise RequestError(
            f"truncate_prompt_tokens value ({keep}) is greater than max_model_len ({most}). Please, select a "
            "smaller truncation size.",
            "truncate_prompt_tokens",
        )
    length = None if keep is None else most if keep == -1 else keep
    ids = prompt.token_ids
    if ids is not None and (length is None or len(ids) <= length or prompt.text is None):
        is_left = options.truncation_side == "left"
        cut = ids if length is None else ids[-length:] if is_left else ids[:length]
        return PoolingPrompt(cut, 0, _num_leading(prompt.instruction, tokenizer, options.add_special_tokens))
    if tokenizer is None:
        raise RequestError("A text needs the tokenizer, which skip_tokenizer_init=True left out.", "prompt")
    adds, text = options.add_special_tokens, prompt.text or ""
    if prompt.around is not None:
        before, after = tokenizer.encode(prompt.around[0], adds), tokenizer.encode(prompt.around[1], False)
        room = None if length is None else min(length, max(0, most - len(before) - len(after)))
        return PoolingPrompt([*before, *tokenizer.encode(text, False)[:room], *after])
    if prompt.pair is not None:
        ids, pair_start = tokenizer.encode_pair(text, prompt.pair, length)
        return PoolingPrompt(ids, pair_start)
    ids = tokenizer.encode(prompt.instruction + text, adds)
    if length is not None and len(ids) > length:
        ids = tokenizer.encode_cut(prompt.instruction + text, length, options.truncation_side, adds)
    return PoolingPrompt(ids, 0, _num_leading(prompt.instruction, tokenizer, adds))


def _num_leading(instruction: str, tokenizer: Tokenizer | None, adds_special: bool) -> int:
    """Return how many tokens an instruction has, without the special token that ends it."""
    if not instruction or tokenizer is None:
        return 0
    leading = tokenizer.encode(instruction, adds_special)
    return len(leading) - (leading[-1] in tokenizer.special_ids)
