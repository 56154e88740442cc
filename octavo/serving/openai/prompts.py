"""The prompts of a completion request, in every form that OpenAI's protocol has for them.

Called by the routes of completions and tokenization. Cheap checks only: the input processor does the rest.
"""

import re
from typing import Any

from octavo.base.errors import RequestError, wrong
from octavo.frontend.media.embeds_file import read_embeds
from octavo.frontend.requests.prompts import PromptType
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.serving.openai.protocol import MAX_PROMPTS, CompletionRequest

_FORMS = "a string, a list of strings, a list of token ids or a list of lists of token ids"
_INFILL_FORMS = (
    "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>",
    "<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>",
    "<fim-prefix>{prefix}<fim-suffix>{suffix}<fim-middle>",
    "<|fim_begin|>{prefix}<|fim_hole|>{suffix}<|fim_end|>",
    "<｜fim▁begin｜>{prefix}<｜fim▁hole｜>{suffix}<｜fim▁end｜>",
    "<|code_prefix|>{prefix}<|code_suffix|>{suffix}<|code_middle|>",
    "[SUFFIX]{suffix}[PREFIX]{prefix}",
)
"""To fill in the middle: of Qwen Coder and CodeGemma, StarCoder, SantaCoder, Yi Coder, DeepSeek Coder, GLM,
Codestral.
"""
_INFILL_MARKS = {form: re.split(r"{\w+}", form) for form in _INFILL_FORMS}


def prompts_of(request: CompletionRequest, tokenizer: Tokenizer | None) -> list[PromptType]:
    """One prompt or several. Raises RequestError."""
    if request.suffix:
        return [infilled(request.prompt, request.suffix, tokenizer)]
    if request.prompt_embeds in (None, []):  # vLLM's clients send an empty list
        if request.prompt is None:
            raise RequestError("Either prompt or prompt_embeds must be given.", "prompt")
        return one_or_several(request.prompt, "prompt", MAX_PROMPTS)
    if request.prompt:
        raise RequestError("Give prompt or prompt_embeds, not both.", "prompt_embeds")
    if request.echo:
        raise wrong("echo", "has nothing to show of prompt_embeds")
    files = request.prompt_embeds
    return [{"prompt_embeds": read_embeds(file)} for file in ([files] if isinstance(files, str) else files)]


def one_or_several(given: Any, field: str, most: int) -> list[PromptType]:
    """Texts or token ids, one prompt or at most so many, as a body's field has them. Raises RequestError."""
    if isinstance(given, str):
        return [given]
    kinds = set(map(type, given)) if isinstance(given, list) else set()
    if kinds == {int}:
        return [given]
    if kinds in ({str}, {list}) and len(given) > most:
        raise wrong(field, f"may hold at most {most} prompts, got {len(given)}")
    if kinds == {str} or (kinds == {list} and all(set(map(type, ids)) == {int} for ids in given)):
        return list(given)
    raise wrong(field, f"must be {_FORMS}, none of them empty")


def infilled(prefix: object, suffix: str, tokenizer: Tokenizer | None) -> str:
    """The prompt, in the form that the model was trained on, as its vocabulary shows. Raises RequestError."""
    vocab = {} if tokenizer is None else tokenizer.get_vocab()
    known = (form for form, marks in _INFILL_MARKS.items() if all(mark in vocab for mark in marks if mark))
    if (form := next(known, None)) is None:
        raise RequestError(
            "This model has no tokens to fill in the middle: leave suffix out, or put what follows into the "
            "prompt in the model's own form.",
            "suffix",
        )
    if not isinstance(prefix, str):
        raise wrong("suffix", "goes with a prompt that is one text")
    return form.format(prefix=prefix, suffix=suffix)
