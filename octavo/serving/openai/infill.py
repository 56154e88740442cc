"""`infilled`: a prompt and what is to follow the completion, as models that fill in the middle read them.

Called by `prompts`. Which form a model was trained on shows in its vocabulary.
"""

import re

from octavo.base.errors import RequestError
from octavo.frontend.text.tokenizer import Tokenizer

_FORMS = (
    "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>",
    "<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>",
    "<fim-prefix>{prefix}<fim-suffix>{suffix}<fim-middle>",
    "<|fim_begin|>{prefix}<|fim_hole|>{suffix}<|fim_end|>",
    "<｜fim▁begin｜>{prefix}<｜fim▁hole｜>{suffix}<｜fim▁end｜>",
    "<|code_prefix|>{prefix}<|code_suffix|>{suffix}<|code_middle|>",
    "[SUFFIX]{suffix}[PREFIX]{prefix}",
)
"""Of Qwen Coder and CodeGemma, StarCoder, SantaCoder, Yi Coder, DeepSeek Coder, GLM, Codestral."""
_MARKS = {form: re.split(r"{\w+}", form) for form in _FORMS}


def infilled(prefix: object, suffix: str, tokenizer: Tokenizer | None) -> str:
    """The prompt. Raises RequestError for a model that knows no such form, and a prompt that is no text."""
    vocab = {} if tokenizer is None else tokenizer.get_vocab()
    known = (form for form, marks in _MARKS.items() if all(mark in vocab for mark in marks if mark))
    if (form := next(known, None)) is None:
        raise RequestError(
            "This model has no tokens to fill in the middle: leave suffix out, or put what follows into the "
            "prompt in the model's own form.",
            "suffix",
        )
    if not isinstance(prefix, str):
        raise RequestError("suffix goes with a prompt that is one text.", "suffix")
    return form.format(prefix=prefix, suffix=suffix)
