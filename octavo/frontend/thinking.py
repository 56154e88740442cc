"""`thinking_tag_ids`: the tokens between which a model reasons, for thinking budgets.

Called by `sampling_limits`. A tag is looked for as its tokenizer writes it: that is exact where tags are
tokens of their own, as in all models that were trained to reason; a model that spells one out in other pieces
goes unnoticed.
"""

from octavo.frontend.parsers.registry import REASONING_PARSERS
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.messages.sampling import MAX_TAG_TOKENS


def thinking_tag_ids(reasoning_parser: str, tokenizer: Tokenizer | None) -> list[list[int]] | None:
    """What opens reasoning, and what closes it; None when the model is not known to reason in short tags.

    reasoning_parser: its name; "" = none
    """
    if tokenizer is None or not reasoning_parser:
        return None
    tags = REASONING_PARSERS.load(reasoning_parser).reasoning_tags()
    ids = [tokenizer.encode(tag, add_special_tokens=False) for tag in tags]
    return ids if ids[1] and max(map(len, ids)) <= MAX_TAG_TOKENS else None
