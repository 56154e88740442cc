"""The tokens between which a model reasons: for thinking budgets, and for forms that hold afterwards.

Called by `sampling_limits` and the input processor. A tag is looked for as its tokenizer writes it: that is
exact where tags are tokens of their own, as in all models that were trained to reason; a model that spells
one out in other pieces goes unnoticed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.frontend.parsers.registry import REASONING_PARSERS
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.messages.sampling import MAX_TAG_TOKENS
from octavo.messages.structured import ReasoningMarks

_TAIL = 64
"""Tokens at the end of a prompt among which a tag may stand."""


def thinking_tag_ids(reasoning_parser: str, tokenizer: Tokenizer | None) -> list[list[int]] | None:
    """What opens reasoning, and what closes it; None when the model is not known to reason in short tags.

    reasoning_parser: its name; "" = none
    """
    if tokenizer is None or not reasoning_parser:
        return None
    return _tag_ids(REASONING_PARSERS.load(reasoning_parser).reasoning_tags(), tokenizer)


@dataclass(frozen=True, slots=True)
class ReasoningStretch:
    """What a model may write before an answer that must have a form."""

    tokenizer: Tokenizer
    tags: tuple[str, str]
    tag_ids: list[list[int]]

    @classmethod
    def of(cls, reasoning_parser: str, tokenizer: Tokenizer | None) -> "ReasoningStretch | None":
        """None when the model is not known to reason in short tags; reasoning_parser: "" = none."""
        if tokenizer is None or not reasoning_parser:
            return None
        tags = REASONING_PARSERS.load(reasoning_parser).answer_tags()
        tag_ids = _tag_ids(tags, tokenizer)
        return cls(tokenizer, tags, tag_ids) if tag_ids else None

    def after(self, prompt_ids: Sequence[int]) -> ReasoningMarks | None:
        """What may come after this prompt; None when it has ended the reasoning itself.

        Nor may an opening come that is a word like others: the form could begin so too.
        """
        opening, closing = self.tags
        tail = self.tokenizer.decode(prompt_ids[-_TAIL:], skip_special_tokens=False).rstrip()
        opening_ids, closing_ids = self.tag_ids
        if tail.endswith(closing):
            return None
        if not opening or tail.endswith(opening):
            return ReasoningMarks(closing_ids)
        is_mark = len(opening_ids) == 1 or opening_ids[0] in self.tokenizer.special_ids
        return ReasoningMarks(closing_ids, opening_ids) if is_mark else None


def _tag_ids(tags: tuple[str, str], tokenizer: Tokenizer) -> list[list[int]] | None:
    ids = [tokenizer.encode(tag, add_special_tokens=False) for tag in tags]
    return ids if ids[1] and max(map(len, ids)) <= MAX_TAG_TOKENS else None
