"""`RestartPolicy`: whether, and after how long, a core that died is started again."""

import time
from collections import deque
from collections.abc import Callable

_MAX_DEATHS = 5
_WITHIN_S = 60.0


class RestartPolicy:
    """Waits 0, 1, 2, 4 seconds after deaths in quick succession; gives up at the fifth within a minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._deaths_s: deque[float] = deque(maxlen=_MAX_DEATHS)

    def delay_s(self) -> float | None:
        """Count a death that happens now: how long to wait before the next start; None: give up."""
        now = self._clock()
        self._deaths_s.append(now)
        num_recent = sum(death_s > now - _WITHIN_S for death_s in self._deaths_s)
        if num_recent >= _MAX_DEATHS:
            return None
        return 0.0 if num_recent == 1 else float(2 ** (num_recent - 2))
