"""The back end over llguidance: an Earley parser with a lexer of regular-expression derivatives.

Masks take about 0.1 ms a row. The library bounds its own work (steps, states, sizes) and then reports an
error, which is the same in every process. Forcing is switched off: the model itself chooses how to spell what
is determined, as it was trained to, and no tokenizer is needed here.
"""

import os
import re
from collections.abc import Sequence
from typing import Self

import llguidance
import numpy as np
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

from octavo.base.errors import RequestError
from octavo.engine.structured.interface import Backend, Matcher
from octavo.engine.structured.lark import to_lark
from octavo.messages.structured import StructuredOutputsParams, Vocabulary

_MAX_LEXER_STATES = 50_000
"""Of up to 2 kB each; they are made as an output grows."""
_MAX_THREADS = 4
_PLACE = re.compile(r"^at \d+\(\d+\): ")
"""In the text that was compiled, which users do not see."""
_SHOWN = 300
"""Characters of the library's message."""


class GuidanceMatcher(Matcher):
    """A matcher of the library."""

    def __init__(self, inner: llguidance.LLMatcher) -> None:
        self.inner = inner

    def copy(self) -> Self:
        """Shares what was compiled."""
        return type(self)(self.inner.deep_copy())

    def advance(self, token_id: int) -> bool:
        """Take one token."""
        if not self.inner.consume_token(token_id):
            raise _refusal(self.inner)
        return self.inner.is_stopped()


class GuidanceBackend(Backend[GuidanceMatcher]):
    """The library with one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        tokens = llguidance.TokenizerWrapper(_Tokens(vocabulary))
        self._tokenizer = llguidance.LLTokenizer(tokens, eos_token=vocabulary.end_ids or None)
        self._num_words = -(-self._tokenizer.vocab_size // 32)
        self._limits = llguidance.LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
        self._threads = llguidance.LLExecutor(min(_MAX_THREADS, os.cpu_count() or 1))

    @staticmethod
    def translate(params: StructuredOutputsParams) -> str:
        """Return the constraint as Lark."""
        return to_lark(params)

    def compile(self, grammar: str) -> GuidanceMatcher:
        """Refused are also grammars that only the empty text fits; the first mask is computed to see that."""
        inner = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        probe = inner.deep_copy()
        first = int.from_bytes(probe.compute_bitmask(), "little")
        if probe.is_error():
            raise _refusal(probe)
        if not first & ~sum(1 << token_id for token_id in self._tokenizer.eos_tokens):
            raise RequestError("Grammar error: it admits no text but the empty one.", "structured_outputs")
        return GuidanceMatcher(inner)

    def fill_masks(self, matchers: Sequence[GuidanceMatcher], masks: np.ndarray) -> None:
        """Fill all rows at once, on a few threads; a single one on this thread."""
        rows = np.empty((len(matchers), self._num_words), np.int32)
        if len(matchers) == 1:
            fill_next_token_bitmask(matchers[0].inner, rows)
        else:
            places = [(matcher.inner, row) for row, matcher in enumerate(matchers)]
            fill_next_token_bitmask_par(self._threads, places, rows)
        masks[:] = rows[:, : masks.shape[1]]


class _Tokens:
    """A vocabulary as the library reads it."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special_ids
        self.eos_token_id = vocabulary.end_ids[0] if vocabulary.end_ids else None
        self._bytes = {token: i for i, token in enumerate(vocabulary.tokens) if len(token) == 1}

    def __call__(self, text: bytes | str) -> list[int]:
        """Only for grammars of users who switch forcing on: byte by byte."""
        data = text.encode() if isinstance(text, str) else text
        return [self._bytes[byte] for i in range(len(data)) if (byte := data[i : i + 1]) in self._bytes]


def _refusal(matcher: llguidance.LLMatcher) -> RequestError:
    """Return what the library has against the grammar, or against a token."""
    text = _PLACE.sub("", matcher.get_error().split("\n<state>")[0].split("\n   1 | ")[0])
    return RequestError(f"Grammar error: {' '.join(text.split())[:_SHOWN]}", "structured_outputs")
