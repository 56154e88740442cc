"""`RequestMatchers`: the matchers of running requests, which say what tokens may come next, and when to end.

Owned by the core, which has it `prepare` requests off its loop; the scheduler opens a matcher per request and
asks for masks when a step is given out. Grammars come checked from the front, so compiling them again is
short; what was compiled is shared and kept within a bound. Only this package knows what a matcher is.
"""

import gc
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
from octavo.engine.structured.mask_places import MaskPlaces
from octavo.engine.structured.reasoning import Prelude
from octavo.engine.structured.request_matcher import FAILURE, RequestMatcher
from octavo.messages.request import EngineRequest
from octavo.messages.step import TokenMasks, num_kept_masks
from octavo.messages.structured import Constraint, Vocabulary

_log = get_logger(__name__)

_MAX_CACHE_BYTES = 512 << 20
_MAX_PRELUDE_BYTES = 8 << 20
_BYTES_PER_GRAMMAR = 1 << 20
_BYTES_PER_CHARACTER = 600
"""Of a compiled grammar and what it grows to; measured for llguidance, from above."""


class RequestMatchers:
    """What was compiled, for all requests."""

    def __init__(self, vocab_size: int, num_kept: int = num_kept_masks(0)) -> None:
        """vocab_size: number of logits; num_kept: masks that the workers keep."""
        self._num_words = -(-vocab_size // 32)
        self._all = np.full(self._num_words, -1, np.int32)
        self._lock = threading.Lock()
        """Guards the cache; never held while something is compiled."""
        self._compiled: LRU[tuple[str, str], Matcher] = LRU(_MAX_CACHE_BYTES)
        self._filler = MaskFiller()
        self._kept = MaskPlaces(num_kept)
        self._preludes: LRU[tuple[int | None, ...], tuple[np.ndarray, np.ndarray]] = LRU(_MAX_PRELUDE_BYTES)
        """By what they depend on: masks, and what they are before a grammar holds."""
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
        hidden_ids = () if request.limits.eos_token_ids else tuple(end_ids)
        prelude = Prelude(constraint.reasoning) if constraint.reasoning else None
        return RequestMatcher(self._matcher(constraint).copy(), backend, hidden_ids, end_ids, prelude)

    def feed(self, fed: Sequence[tuple[RequestMatcher, int]]) -> None:
        """Have matchers take their next tokens, all at once; the `feed` of each then answers."""
        for backend in {matcher.backend for matcher, _ in fed}:
            entries = [entry for entry in fed if entry[0].backend is backend]
            compiled = [matcher.compiled for matcher, _ in entries]
            try:
                answers = backend.advance(compiled, [token_id for _, token_id in entries])
            except Exception as error:  # of the library: it must not reach the loop
                answers = [error] * len(entries)
            for (matcher, _), answer in zip(entries, answers, strict=True):
                matcher.answer = answer

    def token_masks(self, constrained: Sequence[tuple[int, RequestMatcher]]) -> TokenMasks:
        """Return the masks of a step; those that the workers have keep their places there.

        constrained: (index of the request in the step, its matcher), ascending
        """
        matchers = [matcher for _, matcher in constrained]
        masks = self._masks(matchers)
        keys = [(id(mask), matcher.hidden_ids) for mask, matcher in zip(masks, matchers, strict=True)]
        distinct = dict(zip(keys, masks, strict=True))
        kept = self._kept.take(distinct)
        new = [_without(distinct[key], key[1])[: self._num_words].data for key in kept.new]
        numbers = [kept.places[key] for key in keys]
        return TokenMasks([index for index, _ in constrained], numbers, b"".join(new), kept.new_places)

    def _masks(self, matchers: Sequence[RequestMatcher]) -> list[np.ndarray]:
        """Return [words] each; rows that may choose the same tokens often have one object."""
        backends = {matcher.backend for matcher in matchers}
        masks = [self._all] * len(matchers)
        for backend in backends:
            places = [i for i, matcher in enumerate(matchers) if matcher.backend is backend]
            filled = self._filler.masks(backend, [matchers[i] for i in places])
            for i, mask in zip(places, filled, strict=True):
                masks[i] = self._all if mask is None else mask
                if (prelude := matchers[i].prelude) is not None:
                    masks[i] = self._with_prelude(masks[i], prelude, matchers[i].end_ids)
        return masks

    def _with_prelude(self, mask: np.ndarray, prelude: Prelude, end_ids: Sequence[int]) -> np.ndarray:
        """Return the mask of a request that is still in its prelude; equal ones are one object."""
        key = prelude.next_id, id(mask) if prelude.may_be_skipped else 0, *end_ids
        if (known := self._preludes.get(key)) is None:
            known = mask, _with_prelude(mask, prelude, end_ids)
            self._preludes.put(key, known, 2 * mask.nbytes)
        return known[1]

    def _matcher(self, constraint: Constraint) -> Matcher:
        key = Path(constraint.vocabulary).name, constraint.grammar
        with self._lock:
            matcher = self._compiled.get(key)
        if matcher is None:
            backend, _ = self._backend(constraint)
            matcher = _compile(backend, constraint.grammar)
        size = _BYTES_PER_GRAMMAR + _BYTES_PER_CHARACTER * len(constraint.grammar)
        with self._lock:  # anew each time: it grows with the outputs that are open at once
            self._compiled.put(
                key, matcher, min(size * matcher.num_instances, max(size, _MAX_CACHE_BYTES // 2))
            )
        return matcher

    def _backend(self, constraint: Constraint) -> tuple[Backend[Any], list[int]]:
        name = Path(constraint.vocabulary).name
        with self._loading:
            if name not in self._backends:
                vocabulary = _read(Path(constraint.vocabulary))
                self._backends[name] = BACKENDS.load(constraint.backend)(vocabulary), vocabulary.end_ids
                gc.freeze()  # its tables stay: to look through them again would stop steps for 0.3 s
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


def _with_prelude(mask: np.ndarray, prelude: Prelude, end_ids: Sequence[int]) -> np.ndarray:
    """Add to the mask of the grammar, where it may begin already; else that counts for nothing."""
    next_id = prelude.next_id
    if next_id is None:
        return _without(np.full_like(mask, -1), end_ids)
    mask = mask.copy() if prelude.may_be_skipped else np.zeros_like(mask)
    mask[next_id // 32] |= _bit(next_id)
    return mask


def _without(mask: np.ndarray, token_ids: Sequence[int]) -> np.ndarray:
    if token_ids:
        mask = mask.copy()
    for token_id in token_ids:
        mask[token_id // 32] &= ~_bit(token_id)
    return mask


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
