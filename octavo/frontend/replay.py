"""`Replay`: what becomes of open requests when their core dies. They may go on in the next.

Noise belongs to a position and the core continues given outputs exactly, so readers notice only a pause. A
request that itself ends the core must not do so again and again. Those that stand at the same place at two
deaths are suspects: they are sent one by one, the next when the one before has passed that place. If the core
dies once more, the one that was tried last is sent with nothing beside it; if that ends the core, it is at
fault.
"""

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import inf

from octavo.base.errors import EngineDead
from octavo.frontend.client.attached import Dropped
from octavo.frontend.client.quarantine import NEAR, Quarantine
from octavo.frontend.output_processor import OutputProcessor
from octavo.frontend.requests.open_request import OpenRequest
from octavo.messages.request import EngineOutput, EngineRequest, FinishReason

_GOOD_ENDS = (FinishReason.STOP, FinishReason.LENGTH)
_LATE_S = 0.5
"""What the core gets to end a late request by itself, if there is one."""


class Replay:
    """Decides which open requests a new core gets, and when."""

    def __init__(self, processor: OutputProcessor, max_request_s: float, *, is_on: bool) -> None:
        """max_request_s: limit of every request, from its arrival; 0 = none.

        is_on: whether requests go on at all
        """
        self.is_on = is_on
        self._processor = processor
        self._quarantine = Quarantine()
        self._max_request_s = max_request_s or inf
        self._suspects: dict[str, set[str]] = {}
        """Held back: the core's ids by key."""
        self._tried: _Trial | None = None
        self._waiting: list[str] = []
        """The core's ids of what is not sent beside a request that is tried alone."""

    def goes_on(self, error: EngineDead | None) -> bool:
        """Return True if open requests survive this error (None: there is none): another core comes."""
        if error is None:
            return True
        return self.is_on and error.retry_after_s is not None and not isinstance(error, Dropped)

    def check(self, requests: Sequence[EngineRequest]) -> None:
        """Raise RequestError for a request that has killed cores."""
        self._quarantine.check(requests)

    def note_outputs(self, outputs: Iterable[EngineOutput]) -> None:
        """Suspect nobody who asked the same as a request that ends well."""
        if self._quarantine.has_suspects:
            ended = [output.request_id for output in outputs if output.finish_reason in _GOOD_ENDS]
            self._quarantine.clear(request.asked for request in self._processor.owners_of(ended))

    def note_death(self, engine_ids: Collection[str]) -> str | None:
        """Enter what was open in a core that died; return the key of the one at fault, if that is known."""
        lost = self._processor.owners_of(engine_ids)
        repeaters = self._quarantine.note_death(
            ((request.asked, request.stats.num_generation_tokens) for request in lost),
            convicts=not self.is_on,
        )
        if not self.is_on:
            return None
        at_fault, tried = None, self._tried
        if tried is not None and tried.request in lost:
            self._tried = None
            if tried.request.asked in repeaters and tried.is_alone:
                self._quarantine.keep_out(tried.request.asked)
                at_fault = tried.request.key
            elif tried.request.asked in repeaters:
                self._tried = _Trial(tried.request, tried.num_tokens, is_alone=True)
        for request, ids in lost.items():
            if request.asked in repeaters and request.key != at_fault:
                self._suspects.setdefault(request.key, set()).update(ids)
        return at_fault

    def holds_back(self, engine_ids: Iterable[str]) -> bool:
        """Return True if these, which are new, have to wait until a trial is over."""
        is_waiting = self._tried is not None and self._tried.is_alone
        if is_waiting:
            self._waiting += engine_ids
        return is_waiting

    def take(self, engine_ids: Collection[str]) -> list[EngineRequest]:
        """Return what the next core is to do of these; suspects wait for `take_next`."""
        if not self.is_on or not engine_ids:
            return []
        held = {engine_id for ids in self._suspects.values() for engine_id in ids}
        free = [engine_id for engine_id in engine_ids if engine_id not in held]
        if self._tried is None or not self._tried.is_alone:
            return self._processor.resume(free) + self.take_next()
        self._waiting = [*self._waiting, *free]
        return self._processor.resume(self._suspects.pop(self._tried.request.key, ()))

    def take_next(self) -> list[EngineRequest]:
        """Return what may be sent once the request that is tried has come further; else nothing."""
        if self._tried is not None:
            if not self._tried.is_over:
                return []
            self._tried = None
        waiting, self._waiting = self._waiting, []
        resumed = self._processor.resume(waiting)
        while self._suspects and self._tried is None:
            ids = self._suspects.pop(next(iter(self._suspects)))
            for request in self._processor.owners_of(ids):
                resumed += self._processor.resume(ids)
                self._tried = _Trial(request, request.stats.num_generation_tokens)
        return resumed

    def late_keys(self) -> list[str]:
        """Return the open requests whose time is over, whether or not a core is there to end them."""
        now = time.monotonic() - _LATE_S
        return [r.key for r in self._processor.open_requests() if now > self._end_s(r.asked)]

    def _end_s(self, asked: EngineRequest) -> float:
        limit_s = asked.limits.timeout_s
        return asked.standing.arrival_s + min(inf if limit_s is None else limit_s, self._max_request_s)


@dataclass(frozen=True, slots=True)
class _Trial:
    """A suspect that was sent to the core. num_tokens: those that it had"""

    request: OpenRequest
    num_tokens: int
    is_alone: bool = False

    @property
    def is_over(self) -> bool:
        """It has ended, or come further."""
        stats = self.request.stats
        return self.request.finished or stats.num_generation_tokens > self.num_tokens + NEAR
