"""`Gate`: what a pause means to the core. New requests are kept outside, steps may be stopped altogether.

Owned by the core, moved by its commands. Knows nothing of blocks or workers.
"""

from collections.abc import Iterable

from octavo.base.errors import RequestError
from octavo.messages.request import EngineRequest


class Gate:
    """Open, closed (what is inside goes on) or frozen (nothing is computed)."""

    def __init__(self) -> None:
        self.is_closed = False
        self.is_frozen = False
        self.asleep: set[str] = set()
        """What the workers have given up: weights, kv_cache."""
        self._outside: dict[str, EngineRequest] = {}

    def close(self, *, freeze: bool) -> None:
        """Keep new requests outside; `freeze`: give out no more steps."""
        self.is_closed = True
        self.is_frozen = self.is_frozen or freeze

    def open(self) -> None:
        """Go on. Raises RequestError while the workers sleep."""
        if self.asleep:
            raise RequestError(f"The engine is asleep ({', '.join(sorted(self.asleep))}): wake it up first.")
        self.is_closed = self.is_frozen = False

    def keep_out(self, request: EngineRequest) -> bool:
        """True when `request` has to wait outside. One that goes on from a request inside is part of that."""
        leader_id = request.sharing.leader_id
        goes_on = bool(leader_id) and leader_id not in self._outside
        if not self.is_closed or goes_on:
            return False
        self._outside[request.request_id] = request
        return True

    def drop(self, request_ids: Iterable[str]) -> list[EngineRequest]:
        """Let those of these requests go that wait outside; returns them."""
        return [self._outside.pop(request_id) for request_id in request_ids if request_id in self._outside]

    def let_in(self) -> list[EngineRequest]:
        """Who waited outside, in order of arrival, once the gate is open."""
        if self.is_closed:
            return []
        waited, self._outside = list(self._outside.values()), {}
        return waited
