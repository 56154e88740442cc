"""`PauseState`: what a pause means to the core. New requests are queued, and steps may be stopped altogether.

Owned by the core, moved by its commands. Knows nothing of blocks or workers.
"""

from collections.abc import Iterable

from octavo.base.errors import RequestError
from octavo.messages.request import EngineRequest


class PauseState:
    """Running, paused (only requests that were accepted before go on) or frozen (no steps are given out)."""

    def __init__(self) -> None:
        self.is_paused = False
        self.is_frozen = False
        self.asleep: set[str] = set()
        """What the workers have given up: weights, kv_cache."""
        self.queued: dict[str, EngineRequest] = {}

    def pause(self, *, freeze: bool) -> None:
        """Queue new requests; `freeze`: give out no more steps."""
        self.is_paused = True
        self.is_frozen = self.is_frozen or freeze

    def resume(self) -> None:
        """Go on. Raises RequestError while the workers sleep."""
        if self.asleep:
            raise RequestError(f"The engine is asleep ({', '.join(sorted(self.asleep))}): wake it up first.")
        self.is_paused = self.is_frozen = False

    def queue_if_paused(self, request: EngineRequest) -> bool:
        """Return True if `request` was queued. One that follows an accepted request is part of it."""
        leader_id = request.sharing.leader_id
        goes_on = bool(leader_id) and leader_id not in self.queued
        if not self.is_paused or goes_on:
            return False
        self.queued[request.request_id] = request
        return True

    def drop_queued(self, request_ids: Iterable[str]) -> list[EngineRequest]:
        """Remove and return those of these requests that are queued."""
        return [self.queued.pop(request_id) for request_id in request_ids if request_id in self.queued]

    def take_queued(self) -> list[EngineRequest]:
        """Return the queued requests in order of arrival once the engine runs again; until then, none."""
        if self.is_paused:
            return []
        waited, self.queued = list(self.queued.values()), {}
        return waited
