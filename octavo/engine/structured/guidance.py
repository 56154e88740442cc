"""The back end over llguidance: an Earley parser with a lexer of regular-expression derivatives.

Over all tokens a mask takes up to 2 ms inside a string of bounded length, so the library is asked about a
`shortlist` where that is possible: 0.01 to 0.05 ms. Equal answers share one mask.

The library bounds its own work (steps, states, sizes) and then reports an error, which is the same in every
process. Forcing is switched off: the model itself chooses how to spell what is determined, as it was trained
to, and no tokenizer is needed here.
"""

import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from time import thread_time
from typing import Any, Self
from weakref import WeakSet

import llguidance
import numpy as np
from llguidance.numpy import consume_token_par, fill_next_token_bitmask, fill_next_token_bitmask_par

from octavo.base.cores import usable_cores
from octavo.base.errors import RequestError
from octavo.base.lru import LRU
from octavo.engine.structured.alphabet import Alphabet, Alphabets
from octavo.engine.structured.grammar_residues import GrammarResidues
from octavo.engine.structured.interface import Backend, Matcher
from octavo.engine.structured.lark import schema_of, to_lark
from octavo.engine.structured.residues import Counts, Residues, most_blanks, most_items
from octavo.engine.structured.schema_texts import SchemaTexts
from octavo.engine.structured.shortlist import END, JSONTokens, Place, Shortlist, Steps, make_tokenizer
from octavo.engine.structured.spelling import Spelling
from octavo.engine.structured.state import State
from octavo.messages.structured import StructuredOutputsParams, Vocabulary

_MAX_LEXER_STATES = 50_000
"""Of up to 2 kB each; they are made as an output grows."""
_MAX_THREADS = 16
_FEW = 8
"""Matchers that take a token sooner than threads are woken."""
_PER_INSTANCE = 4
"""Outputs."""
_INSTANCES_PER_THREAD = 2
_MAX_COMPILING_S = 0.3
"""Of all instances of a grammar for one list; so large grammars have few."""
_MAX_MASK_BYTES = 64 << 20
_BYTES_PER_MASK = 500
"""Beside the mask and its key."""
_MAX_STATES, _STATES_PER_INSTANCE = 4096, 2048
"""Of a grammar, whose answers are kept; of some 1.5 kB each."""
_INSTANCES_PER_LIST = 2
"""That a list takes as much as, if no other grammar has it."""
_NUM_UNSHARED = 2
"""Matchers of a grammar: the one at its beginning, and that of the first output, perhaps the only one."""
_PLACE = re.compile(r"^at \d+\(\d+\): ")
"""In the text that was compiled, which users do not see."""
_SHOWN = 300
"""Characters of the library's message."""


_Begin = Callable[[Shortlist | None], Future[llguidance.LLMatcher]]
"""Has a grammar compiled for a list, or for all tokens, on a thread: the library needs no interpreter."""
_Texts = tuple[Residues | GrammarResidues, list[Steps] | None, list[bytes]]
"""Of a grammar: what decides how its texts go on, the places behind tokens if there are some, and these."""


class _Grammar:
    """One grammar, as it was compiled for the list of each place. Its matchers stay at the beginning.

    Copies of the library's matchers share a lexer, and its lock. So every few outputs that are open at once
    have an instance of their own, and threads work side by side.
    """

    def __init__(
        self, begin: _Begin, lists: dict[int, Shortlist], most_instances: int, texts: _Texts | None
    ) -> None:
        """texts: None if nothing is known of them."""
        self._begin, self._lists, self._texts = begin, lists, texts
        self._first = [lists.get(place) for place in (Place.OUTSIDE, Place.INSIDE)[: len(lists) or 1]]
        """Of places that most outputs come to."""
        self._instances: list[dict[Shortlist | None, Future[llguidance.LLMatcher]]] = []
        self._most_instances = most_instances
        self._open: WeakSet[GuidanceMatcher] = WeakSet()
        self._states: dict[tuple[int, Any], State] = {}
        self._num_outputs = 0

    @property
    def num_instances(self) -> int:
        """Return how many there are so far; what else there is counts as as many as take its memory."""
        is_schema = self._texts is not None and self._texts[1] is not None
        own_lists = 0 if is_schema else len(self._lists)
        states = len(self._states) // _STATES_PER_INSTANCE
        return len(self._instances) + states + own_lists * _INSTANCES_PER_LIST

    def enter(self, matcher: "GuidanceMatcher") -> tuple[int, State]:
        """Return the instance that a new output belongs to, and its state; a first one shares none."""
        index = len(self._open) // _PER_INSTANCE % self._most_instances
        self._open.add(matcher)
        while index >= len(self._instances):
            self._instances.append({})
        for shortlist in self._first if self._num_outputs else ():  # the first one only begins
            self._have_begun(shortlist, index)
        self._num_outputs += 1
        residue = None
        if self._texts is not None and self._num_outputs > _NUM_UNSHARED:
            residue = self._texts[0].begin()
        return index, self._state(int(Place.OUTSIDE), residue)

    def reader(self, shortlist: Shortlist | None, instance: int) -> llguidance.LLMatcher:
        """Return the matcher that answers for a list; another instance's where its own is not ready."""
        own = self._have_begun(shortlist, instance)
        others = (made[shortlist] for made in self._instances if shortlist in made)
        return next((made for made in (own, *others) if made.done()), own).result()

    def _have_begun(self, shortlist: Shortlist | None, instance: int) -> Future[llguidance.LLMatcher]:
        made = self._instances[instance]
        if shortlist not in made:
            made[shortlist] = self._begin(shortlist)
        return made[shortlist]

    def spell(self, token_ids: list[int], shortlist: Shortlist, *, is_there: bool) -> list[int]:
        """Return what tokens are spelt like in a list, from one of its places, or from the beginning."""
        place, steps, found = int(Place.OUTSIDE), self._texts and self._texts[1], list[int]()
        if is_there:
            place = next(place for place, known in self._lists.items() if known is shortlist)
        for token_id in token_ids:
            found += shortlist.read(token_id, self._lists.get(place))
            place = steps[place][token_id] if steps else place
        return found

    def after(self, state: State, counts: Counts, token_id: int) -> tuple[State, Counts]:
        """Return the state behind a token that may come; `counts` itself if any others had led there."""
        if self._texts is None:
            state.answer = None
            return state, counts
        residues, steps, tokens = self._texts
        place = steps[state.place][token_id] if steps else state.place
        if state.residue is None:
            state.answer = None
            if place != state.place:
                state.move(place, self._lists.get(place))
            return state, counts
        spelt, shortlist = state.spelt[token_id], state.shortlist
        text = (tokens if shortlist is None else shortlist.tokens)[spelt]
        is_end = shortlist is not None and spelt == END
        found = None if is_end else residues.after(state.residue, counts, text)
        return (self._state(place, found[0]), found[1]) if found else (self._state(place, None), counts)

    def _state(self, place: int, residue: Any) -> State:
        state = self._states.get((place, residue)) if residue else None
        if state is None:
            state = State(place, self._lists.get(place), residue)
            if residue and len(self._states) >= _MAX_STATES:
                self._states.clear()
            if residue:
                self._states[place, residue] = state
        return state


class GuidanceMatcher(Matcher):
    """A state, and matchers of the library, one for each list: they read when the state has no answer yet."""

    def __init__(self, grammar: _Grammar) -> None:
        self._grammar = grammar
        self._instance, self.state = grammar.enter(self)
        self._counts: Counts = (0,)
        self._readers: dict[Shortlist | None, tuple[llguidance.LLMatcher, int]] = {}
        """By list, the matcher and how many tokens it has read; it is at a place of this list."""
        self._own: set[Shortlist | None] = set()
        """Lists of those that no copy shares: the others are copied when they read on."""
        self.inner: llguidance.LLMatcher | None = None
        """The one of this place, if it is its own and has read all tokens."""
        self.tokens: list[int] = []
        self.forced: tuple[bytes, int] | None = None
        """A text that was determined, and how many tokens stood before it."""

    def copy(self) -> Self:
        if not self.tokens:
            return type(self)(self._grammar)
        other = copy(self)
        other.tokens, other._readers = self.tokens.copy(), self._readers.copy()
        self._own, other._own = set(), set()
        self.inner = other.inner = None
        if other.state.residue is None:
            other.state = copy(other.state)
        return other

    @property
    def num_instances(self) -> int:
        return self._grammar.num_instances

    def advance(self, token_id: int) -> bool:
        if self.move(token_id):
            return False
        inner, last = self.take(token_id)
        if not inner.consume_tokens([last]):
            raise _refusal(inner)
        return inner.is_stopped()

    def move(self, token_id: int) -> bool:
        """Take the next token if the answer admits it and it ends nothing; return whether it did."""
        state = self.state
        following = state.after.get(spelt := state.spelt[token_id])
        if following is None:
            answer = state.answer
            if state.residue is None or answer is None or not answer[spelt >> 3] >> (spelt & 7) & 1:
                return False
            following, counts = self._grammar.after(state, self._counts, token_id)
            if following.residue is None:
                return False
            if counts is self._counts:
                state.after[spelt] = following
            self._counts = counts
        self.tokens.append(token_id)
        self.state, self.inner = following, None
        return True

    def take(self, token_id: int) -> tuple[llguidance.LLMatcher, int]:
        """Take the next token; return the matcher of the place behind it and what that has to read last."""
        shortlist, spelt = self.state.shortlist, self.state.spelt[token_id]
        self.tokens.append(token_id)
        self.state, self._counts = self._grammar.after(self.state, self._counts, token_id)
        inner, self.inner = self.inner, None
        if inner is not None and self.state.shortlist is shortlist:
            self._readers[shortlist], self.inner = (inner, len(self.tokens)), inner
            return inner, spelt
        inner, last = self.read()
        assert last is not None
        return inner, last

    def read(self) -> tuple[llguidance.LLMatcher, int | None]:
        """Have the matcher of this place read all but the last piece, which is returned; None: it has all."""
        if self.inner is not None:
            return self.inner, None
        shortlist = self.state.shortlist
        known = self._readers.get(shortlist)
        inner, num_read = known or (self._grammar.reader(shortlist, self._instance), 0)
        if shortlist not in self._own:
            inner = inner.deep_copy()
            self._own.add(shortlist)
        self._readers[shortlist], self.inner = (inner, len(self.tokens)), inner
        if not (pieces := self.tokens[num_read:]):
            return inner, None
        if shortlist is not None:
            pieces = self._grammar.spell(pieces, shortlist, is_there=known is not None)
        if len(pieces) > 1:
            inner.consume_tokens(pieces[:-1])  # if one is wrong, so is the last one
        return inner, pieces[-1]


class GuidanceBackend(Backend[GuidanceMatcher]):
    """The library with one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokenizer = make_tokenizer(vocabulary)
        self._json = {int(place): JSONTokens(vocabulary, place) for place in [*Place][: Place.DIGITS]}
        self._alphabets = Alphabets(vocabulary)
        self._steps = [Steps(place, vocabulary.tokens) for place in range(Place.LAST_DIGIT + 1)]
        self._tokens = vocabulary.tokens
        self._reach = most_items(self._tokens), most_blanks(self._tokens)
        self._num_words = -(-self._tokenizer.vocab_size // 32)
        ids = {text: token_id for token_id, text in enumerate(vocabulary.tokens) if text}
        for token_id in (*vocabulary.special_ids, *vocabulary.end_ids):
            ids.pop(vocabulary.tokens[token_id], None)
        self._spelling = Spelling(vocabulary.tokens, ids)
        self._limits = llguidance.LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
        self._num_threads = min(_MAX_THREADS, usable_cores())
        self._threads = llguidance.LLExecutor(self._num_threads)
        self._compilers = ThreadPoolExecutor(self._num_threads, "grammar")
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
        most_instances = max(1, min(most_instances, _INSTANCES_PER_THREAD * self._num_threads))
        texts: _Texts | None = None
        if (schema := schema_of(grammar)) is not None:
            texts = Residues(schema, *self._reach), self._steps, self._tokens
        elif lists:
            texts = GrammarResidues(grammar.partition("\n")[2]), None, self._tokens

        def begin(shortlist: Shortlist | None) -> Future[llguidance.LLMatcher]:
            return self._compilers.submit(self._begin, grammar, shortlist)

        return GuidanceMatcher(_Grammar(begin, lists, most_instances, texts))

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
        """Ask for those of new states, all at once, those of equal vocabularies together."""
        new = {matcher.state: matcher for matcher in matchers if matcher.state.answer is None}
        failed = self._ask(list(new.values())) if new else ()
        states = [matcher.state for matcher in matchers]
        masks = {state: self._widen(state) for state in dict.fromkeys(states)}
        for state in failed:
            state.answer = None
        return [masks[state] for state in states]

    def advance(
        self, matchers: Sequence[GuidanceMatcher], token_ids: Sequence[int]
    ) -> list[bool | Exception]:
        """See Backend: on all cores."""
        if len(matchers) == 1:
            return super().advance(matchers, token_ids)
        rows: list[int] = []
        due: list[tuple[llguidance.LLMatcher, int]] = []
        answers: list[bool | Exception] = [False] * len(matchers)
        for row, (matcher, token_id) in enumerate(zip(matchers, token_ids, strict=True)):
            try:
                if matcher.state.residue is None or not matcher.move(token_id):
                    due.append(matcher.take(token_id))
                    rows.append(row)
            except Exception as error:
                answers[row] = error
        for row, (inner, _), is_right in zip(rows, due, self._consume(due), strict=True):
            answers[row] = inner.is_stopped() if is_right else _refusal(inner)
        return answers

    def forced(self, matcher: GuidanceMatcher) -> list[int]:
        """See Backend. How the text before was spelt in the end, is kept for the next output."""
        if matcher.forced is not None:
            text, first = matcher.forced
            if self._spelling.learn(text, matcher.tokens[first:]):
                matcher.forced = None
        inner, last = matcher.read()
        if last is not None:
            inner.consume_tokens([last])
        text = inner.compute_ff_bytes()
        if text and matcher.forced is None:
            matcher.forced = text, len(matcher.tokens)
        return self._spelling.tokens(text) if text else []

    def _consume(self, due: list[tuple[llguidance.LLMatcher, int]]) -> list[bool]:
        """Many on all cores, a few on this thread."""
        if len(due) > _FEW:
            return consume_token_par(self._threads, due)
        return [inner.consume_tokens([token_id]) for inner, token_id in due]

    def _ask(self, matchers: Sequence[GuidanceMatcher]) -> list[State]:
        """Have the library answer for their states; return those in which it failed. A single one here."""
        read = [matcher.read() for matcher in matchers]
        self._consume([(inner, last) for inner, last in read if last is not None])
        groups: dict[int, list[int]] = {}
        for row, matcher in enumerate(matchers):
            shortlist = matcher.state.shortlist
            groups.setdefault(self._num_words if shortlist is None else shortlist.num_words, []).append(row)
        for num_words, rows in groups.items():
            answers = np.empty((len(rows), num_words), np.int32)
            if len(rows) == 1:
                fill_next_token_bitmask(read[rows[0]][0], answers)
            else:
                asked = [(read[row][0], place) for place, row in enumerate(rows)]
                fill_next_token_bitmask_par(self._threads, asked, answers)
            data, size = answers.tobytes(), 4 * num_words
            for place, row in enumerate(rows):
                matchers[row].state.answer = data[place * size : (place + 1) * size]
        return [matcher.state for matcher, (inner, _) in zip(matchers, read, strict=True) if inner.is_error()]

    def _widen(self, state: State) -> np.ndarray:
        shortlist, answer = state.shortlist, state.answer
        assert answer is not None
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
