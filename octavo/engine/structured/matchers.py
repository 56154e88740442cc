"""`RequestMatchers`: the matchers of running requests, which say what tokens may come next, and when to end.

Owned by the core, which has it `prepare` requests off its loop; the scheduler opens a matcher per request and
asks for masks when a step is given out. Grammars come checked from the front, so compiling them again is
short; what was compiled is shared and kept within a bound. Only this package knows what a matcher is.
"""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from octavo.base.errors import RequestError
from octavo.base.log import get_logger
from octavo.base.lru import LRU
from octavo.engine.structured import BACKENDS
from octavo.engine.structured.interface import Backend, Matcher
from octavo.engine.structured.mask_filler import MaskFiller
from octavo.engine.structured.reasoning import Prelude
from octavo.engine.structured.request_matcher import FAILURE, RequestMatcher
from octavo.messages.request import EngineRequest
from octavo.messages.step import TokenMasks
from octavo.messages.structured import Constraint, Vocabulary

_log = get_logger(__name__)

_MAX_CACHE_BYTES = 256 << 20
_BYTES_PER_GRAMMAR = 1 << 20
_BYTES_PER_CHARACTER = 600
"""Of a compiled grammar and what it grows to; measured for llguidance, from above."""


class RequestMatchers:
    """What was compiled, for all requests."""

    def __init__(self, vocab_size: int) -> None:
        """vocab_size: number of logits."""
        self._num_words = -(-vocab_size // 32)
        self._lock = threading.Lock()
        """Guards the cache; never held while something is compiled."""
        self._compiled: LRU[tuple[str, str], Matcher] = LRU(_MAX_CACHE_BYTES)
        self._filler = MaskFiller()
        self._loading = threading.Lock()
        self._backends: dict[str, tuple[Backend[Any], list[int]]] = {}
        """By content of the vocabulary: the back end and the ends of text."""

    def prepare(self, request: EngineRequest) -> None:
        """Compile what `open_matcher` will need, which finds again what goes wrong here; on any thread."""
        if request.constraint is not None:
            try:
                self._matcher(request.constraint)
            except RequestError as error:
                _log.warning("A grammar that had passed its check was refused: %s", error)

    def open_matcher(self, request: EngineRequest) -> RequestMatcher | None:
        """Return a matcher at its beginning; None for a request that has none. Raises RequestError."""
        constraint = request.constraint
        if constraint is None:
            return None
        backend, end_ids = self._backend(constraint)
        hidden_ids = () if request.limits.eos_token_ids else end_ids
        prelude = Prelude(constraint.reasoning) if constraint.reasoning else None
        return RequestMatcher(self._matcher(constraint).copy(), backend, hidden_ids, end_ids, prelude)

    def token_masks(self, constrained: Sequence[tuple[int, RequestMatcher]]) -> TokenMasks:
        """Return the masks of a step.

        constrained: (index of the request in the step, its matcher), ascending
        """
        bits = np.empty((len(constrained), self._num_words), np.int32)
        for backend in {matcher.backend for _, matcher in constrained}:
            rows = [row for row, (_, matcher) in enumerate(constrained) if matcher.backend is backend]
            part = np.empty((len(rows), self._num_words), np.int32)
            self._filler.fill(backend, [constrained[row][1] for row in rows], part)
            bits[rows] = part
        for row, (_, matcher) in enumerate(constrained):
            if matcher.prelude is not None:
                _add_prelude(bits[row], matcher.prelude, matcher.end_ids)
            _clear(bits[row], matcher.hidden_ids)
        return TokenMasks([index for index, _ in constrained], bits.tobytes())

    def _matcher(self, constraint: Constraint) -> Matcher:
        key = Path(constraint.vocabulary).name, constraint.grammar
        with self._lock:
            known = self._compiled.get(key)
        if known is not None:
            return known
        backend, _ = self._backend(constraint)
        matcher = _compile(backend, constraint.grammar)
        size = _BYTES_PER_GRAMMAR + _BYTES_PER_CHARACTER * len(constraint.grammar)
        with self._lock:
            self._compiled.put(key, matcher, size)
        return matcher

    def _backend(self, constraint: Constraint) -> tuple[Backend[Any], list[int]]:
        name = Path(constraint.vocabulary).name
        with self._loading:
            if name not in self._backends:
                vocabulary = _read(Path(constraint.vocabulary))
                self._backends[name] = BACKENDS.load(constraint.backend)(vocabulary), vocabulary.end_ids
            return self._backends[name]


def _compile(backend: Backend[Any], grammar: str) -> Matcher:
    try:
        matcher: Matcher = backend.compile(grammar)
    except RequestError:
        raise
    except Exception as error:  # of the library: it must not reach the loop
        _log.exception("A grammar that had passed its check failed.")
        raise RequestError(FAILURE, "structured_outputs") from error
    return matcher


def _add_prelude(row: np.ndarray, prelude: Prelude, end_ids: Sequence[int]) -> None:
    """To the mask of the grammar, where it may begin already; else that counts for nothing."""
    next_id = prelude.next_id
    if next_id is None:
        row[:] = -1
        _clear(row, end_ids)
        return
    if not prelude.may_be_skipped:
        row[:] = 0
    row[next_id // 32] |= _bit(next_id)


def _clear(row: np.ndarray, token_ids: Sequence[int]) -> None:
    for token_id in token_ids:
        row[token_id // 32] &= ~_bit(token_id)


def _bit(token_id: int) -> np.int32:
    """Return the bit of its word; the highest one is the sign."""
    return np.uint32(1 << token_id % 32).view(np.int32)


def _read(path: Path) -> Vocabulary:
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=Vocabulary)
    except (OSError, msgspec.MsgspecError) as error:
        _log.exception("The vocabulary for structured output cannot be read.")
        raise RequestError(
            "The engine cannot read the vocabulary for structured output; its log says why.",
            "structured_outputs",
        ) from error
