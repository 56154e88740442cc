"""`StepPacing`: when the next step must be given out, so that the device need not wait for it, and no sooner.

A request that arrives when the next step has been given out waits for one step more. So while few run, the
core takes in what arrives until shortly before the step on the device ends. How long that takes is guessed
from the last steps of about as many tokens: the shortest of them, because a guess too short costs nothing.
Owned by the core; knows numbers of tokens and times.
"""

from collections import deque
from collections.abc import Callable

_ALIKE = 8  # numbers of tokens between whose multiples steps count as alike
_LAST = 4  # steps of a kind that are remembered; fewer are no ground for a guess
_SLACK_S = 0.0005


class StepPacing:
    """Measures what steps take on the device and on the host, if they are given out one behind the other."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """clock: seconds."""
        self._clock = clock
        self._dispatched: deque[tuple[int, float, float]] = deque()
        """Kind of each step in flight, when the host began with it, and when it was given out."""
        self._took: dict[int, deque[float]] = {}
        self._host_took: deque[float] = deque(maxlen=_LAST)
        self._ended_s = 0.0

    def begin_step(self, num_tokens: int, began_s: float, *, is_late: bool) -> None:
        """Note a step that was given out, which took the host from `began_s` until now.

        is_late: the one before had ended by then. What was known of its kind is wrong: forget it.
        """
        if is_late:
            self._took.pop(self._dispatched[0][0], None)
        now_s = self._clock()
        self._host_took.append(now_s - began_s)
        self._dispatched.append((num_tokens // _ALIKE, began_s, now_s))

    def end_step(self) -> float:
        """Note the end of the oldest step; return what it took, from its beginning or the end before."""
        kind, began_s, given_s = self._dispatched.popleft()
        took = self._took.setdefault(kind, deque(maxlen=_LAST))
        now_s = self._clock()
        took.append(now_s - max(self._ended_s, given_s))
        took_s = now_s - max(self._ended_s, began_s)
        self._ended_s = now_s
        return took_s

    def due_s(self) -> float:
        """Return when to begin giving out the step behind the oldest in flight; 0 where nothing is known."""
        kind, _, given_s = self._dispatched[0]
        took = self._took.get(kind, ())
        if len(took) < _LAST:
            return 0.0
        return max(self._ended_s, given_s) + min(took) - 2 * max(self._host_took) - _SLACK_S
