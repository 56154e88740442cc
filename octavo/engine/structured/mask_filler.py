"""`MaskFiller`: the masks of a step, none of which may keep the step waiting for long.

Used by `matchers`. Masks take 0.01 to 2 ms, of large schemas more; those of ambiguous grammars grow with the
output, to a second each. As long as all masks of a step together are quick for their number, nobody looks
closer. Else the next steps' are filled one by one, and the processor time of each is taken. A request whose
masks were slow too often fails; the others go on.
"""

from collections.abc import Sequence
from time import perf_counter, thread_time
from typing import Any

import numpy as np

from octavo.base.cores import usable_cores
from octavo.base.log import get_logger
from octavo.engine.structured.interface import Backend
from octavo.engine.structured.request_matcher import FAILURE, RequestMatcher

_log = get_logger(__name__)
SLOW_S = 0.025
MAX_SLOW_S = 0.5
"""Of one request, all its slow masks together."""
_ORDINARY_S = 0.002
"""Of one mask, on one core: that many requests ask at once raises no suspicion."""
_WATCHED_STEPS = 16
_TOO_SLOW = (
    f"The grammar is too slow: finding the tokens that may come next took {MAX_SLOW_S:g} s, in masks of more "
    f'than {1000 * SLOW_S:g} ms each. Ambiguous rules do that, such as s: s s | "a". Write them so that a '
    'text can be derived in one way only, such as s: "a"+.'
)


class MaskFiller:
    """Knows how quick the last masks were."""

    def __init__(self) -> None:
        self._num_watched = 0
        """Further steps whose masks are filled one by one."""

    def masks(self, backend: Backend[Any], matchers: Sequence[RequestMatcher]) -> list[np.ndarray | None]:
        """See Backend.masks. A matcher that is too slow, or makes the library raise, fails alone: None."""
        if len(matchers) > 1 and not self._num_watched:
            began_s, usual_s = perf_counter(), SLOW_S + _ORDINARY_S * len(matchers) / usable_cores()
            if (masks := _masks(backend, matchers)) is not None:
                self._num_watched = _WATCHED_STEPS if perf_counter() - began_s > usual_s else 0
                return [*masks]
        self._num_watched = max(0, self._num_watched - 1)
        return [_mask(backend, matcher) for matcher in matchers]


def _masks(backend: Backend[Any], matchers: Sequence[RequestMatcher]) -> list[np.ndarray] | None:
    try:
        return backend.masks([matcher.compiled for matcher in matchers])
    except Exception:  # of the library: it must not reach the loop
        if len(matchers) == 1:
            _log.exception("A grammar failed on its way.")
        return None


def _mask(backend: Backend[Any], matcher: RequestMatcher) -> np.ndarray | None:
    began_s = thread_time()
    masks = None if matcher.failure else _masks(backend, [matcher])
    if masks is None:
        matcher.failure = matcher.failure or FAILURE
        return None
    took_s = thread_time() - began_s
    if took_s > SLOW_S:
        matcher.slow_s += took_s
        if matcher.slow_s > MAX_SLOW_S:
            matcher.failure = _TOO_SLOW
    return masks[0]
