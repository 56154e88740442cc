"""The back end over llguidance: an Earley parser with a lexer of regular-expression derivatives.

Over all tokens a mask takes up to 2 ms inside a string of bounded length, so the library is asked about a
`shortlist` where that is possible: 0.01 to 0.05 ms. Equal answers share one mask.

The library bounds its own work (steps, states, sizes) and then reports an error, which is the same in every
process. Forcing is switched off: the model itself chooses how to spell what is determined, as it was trained
to, and no tokenizer is needed here.
"""

import re
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from time import thread_time
from typing import Self
from weakref import WeakSet

import llguidance
import numpy as np
from llguidance.numpy import consume_token_par, fill_next_token_bitmask, fill_next_token_bitmask_par

from octavo.base.cores import usable_cores
from octavo.base.errors import RequestError
from octavo.base.lru import LRU
from octavo.engine.structured.alphabet import Alphabet, Alphabets
from octavo.engine.structured.interface import Backend, Matcher
from octavo.engine.structured.lark import schema_of, to_lark
from octavo.engine.structured.schema_texts import SchemaTexts
from octavo.engine.structured.shortlist import JSONTokens, Place, Shortlist, Steps, make_tokenizer
from octavo.engine.structured.spelling import Spelling
from octavo.messages.structured import StructuredOutputsParams, Vocabulary

_MAX_LEXER_STATES = 50_000
"""Of up to 2 kB each; they are made as an output grows."""
_MAX_THREADS = 16
_PER_INSTANCE = 4
"""Outputs."""
_INSTANCES_PER_THREAD = 2
_MAX_COMPILING_S = 0.3
"""Of all instances of a grammar for one list; so large grammars have few."""
_MAX_MASK_BYTES = 64 << 20
_BYTES_PER_MASK = 500
"""Beside the mask and its key."""
_NO_MASK = np.zeros(0, np.int32)
_PLACE = re.compile(r"^at \d+\(\d+\): ")
"""In the text that was compiled, which users do not see."""
_SHOWN = 300
"""Characters of the library's message."""


_Begin = Callable[[Shortlist | None], llguidance.LLMatcher]
"""Compiles a grammar for a list, or for all tokens."""


class _Grammar:
    """One grammar, as it was compiled for the list of each place. Its matchers stay at the beginning.

    Copies of the library's matchers share a lexer, and its lock. So every few outputs that are open at once
    have an instance of their own, and threads work side by side.
    """

    def __init__(
        self, begin: _Begin, lists: dict[int, Shortlist], steps: list[Steps] | None, most_instances: int
    ) -> None:
        """steps: None if all places are one."""
        self._begin, self._lists, self.steps = begin, lists, steps
        self._instances: list[dict[Shortlist | None, llguidance.LLMatcher]] = []
        self._most_instances = most_instances
        self._open: WeakSet[GuidanceMatcher] = WeakSet()

    @property
    def num_instances(self) -> int:
        """Return how many there are so far."""
        return len(self._instances)

    def enter(self, matcher: "GuidanceMatcher") -> int:
        """Return the instance that a new output belongs to."""
        index = len(self._open) // _PER_INSTANCE % self._most_instances
        self._open.add(matcher)
        while index >= len(self._instances):
            self._instances.append({})
        return index

    def reader(self, place: int, instance: int) -> tuple[llguidance.LLMatcher, Shortlist | None]:
        """Return the matcher that knows what may come in a place, and the list that it answers for."""
        shortlist, made = self._lists.get(place), self._instances[instance]
        if shortlist not in made:
            made[shortlist] = self._begin(shortlist)
        return made[shortlist], shortlist


class GuidanceMatcher(Matcher):
    """Matchers of the library: that of the place where an output stands has read all, others lag behind."""

    def __init__(self, grammar: _Grammar) -> None:
        self._grammar, self._steps, self._place = grammar, grammar.steps, int(Place.OUTSIDE)
        self._lagging: dict[Shortlist | None, tuple[llguidance.LLMatcher, int]] = {}
        """By list, the matcher and how many tokens it had read when another last took over."""
        self._shares_lagging = False
        """With copies: they are copied when they take over."""
        self.tokens: list[int] = []
        self.forced: tuple[bytes, int] | None = None
        """A text that was determined, and how many tokens stood before it."""
        self._instance = grammar.enter(self)
        inner, self.shortlist = grammar.reader(self._place, self._instance)
        self.inner = inner.deep_copy()
        """Both for the place of the output."""

    def copy(self) -> Self:
        if not self.tokens:
            return type(self)(self._grammar)
        other = copy(self)
        other.tokens, other.inner = self.tokens.copy(), self.inner.deep_copy()
        other._lagging = self._lagging.copy()
        self._shares_lagging = other._shares_lagging = True
        return other

    @property
    def num_instances(self) -> int:
        return self._grammar.num_instances

    def advance(self, token_id: int) -> bool:
        last = self.take(token_id)
        if not self.inner.consume_tokens([last]):
            raise _refusal(self.inner)
        return self.inner.is_stopped()

    def take(self, token_id: int) -> int:
        """Take the next token; return what `inner`, which may be another one now, has to read last."""
        self.tokens.append(token_id)
        shortlist = self.shortlist
        if self._steps is not None and (place := self._steps[self._place][token_id]) != self._place:
            self._place = place
            first, self.shortlist = self._grammar.reader(place, self._instance)
            if self.shortlist is not shortlist:
                self._lagging[shortlist] = self.inner, len(self.tokens) - 1
                return self._catch_up(first)
        return token_id if shortlist is None else shortlist.spelt(token_id)

    def _catch_up(self, first: llguidance.LLMatcher) -> int:
        """Have the matcher of this place read what it has not but the last piece, which is returned."""
        if (lagging := self._lagging.get(self.shortlist)) is None:
            self.inner, num_read = first.deep_copy(), 0
        else:
            inner, num_read = lagging
            self.inner = inner.deep_copy() if self._shares_lagging else inner
        new = self.tokens[num_read:]
        *before, last = new if self.shortlist is None else self.shortlist.read(new)
        if before:
            self.inner.consume_tokens(before)  # if one is wrong, so is the last one
        return last


class GuidanceBackend(Backend[GuidanceMatcher]):
    """The library with one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokenizer = make_tokenizer(vocabulary)
        places = (Place.OUTSIDE, Place.INSIDE, Place.ESCAPING)
        self._json = {int(place): JSONTokens(vocabulary, place) for place in places}
        self._alphabets = Alphabets(vocabulary)
        self._steps = [Steps(place, vocabulary.tokens) for place in range(Place.LAST_DIGIT + 1)]
        self._num_words = -(-self._tokenizer.vocab_size // 32)
        ids = {text: token_id for token_id, text in enumerate(vocabulary.tokens) if text}
        for token_id in (*vocabulary.special_ids, *vocabulary.end_ids):
            ids.pop(vocabulary.tokens[token_id], None)
        self._spelling = Spelling(vocabulary.tokens, ids)
        self._limits = llguidance.LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
        self._num_threads = min(_MAX_THREADS, usable_cores())
        self._threads = llguidance.LLExecutor(self._num_threads)
        self._masks: LRU[tuple[int, bytes], np.ndarray] = LRU(_MAX_MASK_BYTES)
        """What the answers for a shortlist mean, by its number and the answer."""

    @staticmethod
    def translate(params: StructuredOutputsParams) -> str:
        return to_lark(params)

    def compile(self, grammar: str) -> GuidanceMatcher:
        """Refused are also grammars that only the empty text fits; the first mask is computed to see that."""
        began_s = thread_time()
        probe = self._begin(grammar, None)
        most_instances = int(_MAX_COMPILING_S / max(thread_time() - began_s, 1e-3))
        first = int.from_bytes(probe.compute_bitmask(), "little")
        if probe.is_error():
            raise _refusal(probe)
        if not first & ~sum(1 << token_id for token_id in self._tokenizer.eos_tokens):
            raise RequestError("Grammar error: it admits no text but the empty one.", "structured_outputs")
        lists = self._shortlists(grammar)
        steps = None if schema_of(grammar) is None else self._steps
        most_instances = max(1, min(most_instances, _INSTANCES_PER_THREAD * self._num_threads))
        return GuidanceMatcher(_Grammar(partial(self._begin, grammar), lists, steps, most_instances))

    def _shortlists(self, grammar: str) -> dict[int, Shortlist]:
        """Return the list of each place that has one."""
        lists: dict[int, Shortlist | None] = {}
        if (schema := schema_of(grammar)) is not None:
            if (texts := SchemaTexts.read(schema)) is not None:
                lists = {place: tokens.shortlist(texts) for place, tokens in self._json.items()}
        elif (alphabet := Alphabet.read(grammar)) is not None:
            lists = {Place.OUTSIDE: self._alphabets.shortlist(alphabet)}
        return {place: shortlist for place, shortlist in lists.items() if shortlist is not None}

    def _begin(self, grammar: str, shortlist: Shortlist | None) -> llguidance.LLMatcher:
        tokenizer = self._tokenizer if shortlist is None else shortlist.tokenizer
        return llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=self._limits)

    def masks(self, matchers: Sequence[GuidanceMatcher]) -> list[np.ndarray]:
        """Ask for all at once, those of equal vocabularies together."""
        masks: list[np.ndarray] = [_NO_MASK] * len(matchers)
        groups: dict[int, list[int]] = {}
        for row, matcher in enumerate(matchers):
            shortlist = matcher.shortlist
            groups.setdefault(self._num_words if shortlist is None else shortlist.num_words, []).append(row)
        for num_words, rows in groups.items():
            answers = self._ask([matchers[row].inner for row in rows], num_words)
            data, size = answers.tobytes(), 4 * num_words
            for place, row in enumerate(rows):
                masks[row] = self._widen(matchers[row].shortlist, data[place * size : (place + 1) * size])
        return masks

    def advance(
        self, matchers: Sequence[GuidanceMatcher], token_ids: Sequence[int]
    ) -> list[bool | Exception]:
        """See Backend: on all cores."""
        if len(matchers) == 1:
            return super().advance(matchers, token_ids)
        read: list[tuple[llguidance.LLMatcher, int]] = []
        answers: list[bool | Exception] = [False] * len(matchers)
        for row, (matcher, token_id) in enumerate(zip(matchers, token_ids, strict=True)):
            try:
                last = matcher.take(token_id)
            except Exception as error:
                answers[row], last = error, 0
            read.append((matcher.inner, last))
        for row, is_right in enumerate(consume_token_par(self._threads, read)):
            inner, _ = read[row]
            if answers[row] is False:
                answers[row] = inner.is_stopped() if is_right else _refusal(inner)
        return answers

    def forced(self, matcher: GuidanceMatcher) -> list[int]:
        """See Backend. How the text before was spelt in the end, is kept for the next output."""
        if matcher.forced is not None:
            text, first = matcher.forced
            if self._spelling.learn(text, matcher.tokens[first:]):
                matcher.forced = None
        text = matcher.inner.compute_ff_bytes()
        if text and matcher.forced is None:
            matcher.forced = text, len(matcher.tokens)
        return self._spelling.tokens(text) if text else []

    def _ask(self, inners: Sequence[llguidance.LLMatcher], num_words: int) -> np.ndarray:
        """On all cores; a single one on this thread."""
        answers = np.empty((len(inners), num_words), np.int32)
        if len(inners) == 1:
            fill_next_token_bitmask(inners[0], answers)
        else:
            fill_next_token_bitmask_par(self._threads, [(x, i) for i, x in enumerate(inners)], answers)
        return answers

    def _widen(self, shortlist: Shortlist | None, answer: bytes) -> np.ndarray:
        key = -1 if shortlist is None else shortlist.number, answer
        mask = self._masks.get(key)
        if mask is None:
            bits = np.frombuffer(answer, np.int32)
            mask = bits if shortlist is None else shortlist.widen(bits)
            self._masks.put(key, mask, mask.nbytes + len(answer) + _BYTES_PER_MASK)
        return mask


def _refusal(matcher: llguidance.LLMatcher) -> RequestError:
    """Return what the library has against the grammar, or against a token."""
    text = _PLACE.sub("", matcher.get_error().split("\n<state>")[0].split("\n   1 | ")[0])
    return RequestError(f"Grammar error: {' '.join(text.split())[:_SHOWN]}", "structured_outputs")
