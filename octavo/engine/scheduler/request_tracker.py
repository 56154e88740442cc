"""`RequestTracker`: every request's place, from arrival to the moment nothing of it is left in the engine.

The scheduler plans with it, `update` ends requests in it. Owns the lifetimes of blocks and of the runner's
slots: both are freed together, and never while a step in flight has a part of the request. Only the blocks of
a request that asked for it are retained beyond its end.
"""

import time

from octavo.engine.kvcache.manager import KVCacheManager
from octavo.engine.kvcache.pins import Pins
from octavo.engine.scheduler.bulk_seats import BulkSeats
from octavo.engine.scheduler.policies.interface import Policy
from octavo.engine.scheduler.queue import RunningSet, WaitingQueue
from octavo.engine.scheduler.request import Request, RequestStatus
from octavo.messages.request import FinishReason, KVSource


class RequestTracker:
    """Requests by id, waiting, running, and leaving (finished, but part of a step in flight)."""

    def __init__(self, kv: KVCacheManager, policy: Policy, max_num_seqs: int, pins: Pins) -> None:
        self.kv = kv
        self.pins = pins
        self._policy = policy
        self.requests: dict[str, Request] = {}
        self._lists: set[Request] = set()
        self.bulk_seats = BulkSeats(max_num_seqs)
        self.waiting = WaitingQueue(policy, self.bulk_seats)
        self.running = RunningSet(policy)
        self.leaving: set[Request] = set()
        self.retained: dict[str, Request] = {}
        """Ended requests, oldest first, whose blocks are kept because followers will go on from them. It is a
        cache: who comes too late finds what the prefix map still has."""
        self.released_ids: list[str] = []
        """Requests whose slots the runner may free; sent down with the next step."""
        self.num_preemptions = 0

    def find(self, request_id: str) -> Request | None:
        """Return the request of this id, a retained one too."""
        return self.requests.get(request_id) or self.retained.get(request_id)

    def add(self, request: Request) -> None:
        """Enter a new request."""
        self.requests[request.request_id] = request
        if request.texts:
            self._lists.add(request)
        self._policy.enter(request)
        self.bulk_seats.enter(request)
        self.waiting.add(request)

    @property
    def num_texts(self) -> int:
        """Return how many texts wait behind the first ones of their lists."""
        return sum(len(request.texts) - 1 for request in self._lists if request.texts)

    def source_of(self, request: Request) -> KVSource | None:
        """Return where another engine finds the prompt of a request, the part that can be passed on."""
        num_tokens = self.kv.sharable_tokens(request.num_prompt_tokens)
        return self.kv.shared.source_of(request.request_id, num_tokens // self.kv.hash_block_size)

    def start(self, request: Request) -> None:
        """Move a request from waiting to running; a list waits in its place until steps have all of it."""
        request.scheduled_s = request.scheduled_s or time.monotonic()
        if request.texts:
            return
        self.waiting.remove(request)
        request.move_to(RequestStatus.RUNNING)
        request.leader = None
        self.running.add(request)
        self.bulk_seats.take(request)

    def preempt(self, request: Request) -> None:
        """Take a running request's blocks; it waits to start anew. No step in flight may have part of it."""
        assert request.num_in_flight == 0 and request.num_pending == 0, f"{request.request_id} is in flight"
        self.running.remove(request)
        self.bulk_seats.give_back(request)
        request.move_to(RequestStatus.PREEMPTED)
        self._release(request)
        request.num_computed = request.routine_until = 0
        self.waiting.add(request)
        request.num_preemptions += 1
        self.num_preemptions += 1

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request in any state but finished."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self.bulk_seats.give_back(request)
        else:
            self.waiting.remove(request)
        request.move_to(RequestStatus.FINISHED)
        request.finish_reason, request.texts = reason, []
        request.leader = None
        self._policy.leave(request)
        self.bulk_seats.leave(request)
        if request.num_in_flight:
            self.leaving.add(request)
        else:
            self._leave(request)

    def drop_retained(self, request: Request) -> None:
        """Retain a finished request no longer."""
        request.hold = False
        if self.retained.pop(request.request_id, None) is not None:
            assert request.table is not None
            self.kv.release(request.table)
            request.table = None

    def drop_oldest_retained(self) -> bool:
        """Make room; return False if nothing is retained."""
        oldest = next(iter(self.retained.values()), None)
        if oldest is not None:
            self.drop_retained(oldest)
        return oldest is not None

    def retire(self, request: Request) -> None:
        """Free what a finished request holds when its last step in flight has been read."""
        if request.num_in_flight == 0:
            self.leaving.remove(request)
            self._leave(request)

    def take_released(self) -> list[str]:
        """Hand over the ids to send down."""
        released, self.released_ids = self.released_ids, []
        return released

    def _leave(self, request: Request) -> None:
        del self.requests[request.request_id]
        self._lists.discard(request)
        if request.table is None:
            return
        if request.hold and request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.kv.commit(request.table, request.chain, request.token_ids, request.num_computed)
            self.released_ids.append(request.request_id)
            self.retained[request.request_id] = request
        else:
            self._release(request)
        retention = request.sharing.retention
        if retention is not None and request.finish_reason is not FinishReason.ERROR:
            length = request.num_prompt_tokens
            length = length if retention.num_tokens is None else min(length, retention.num_tokens)
            self.pins.keep(request.chain, request.token_ids[:length], retention)

    def _release(self, request: Request) -> None:
        """Give back blocks and slot; what is known and sound stays findable in the prefix map."""
        assert request.table is not None
        failed = request.finish_reason is FinishReason.ERROR
        if not failed:
            self.kv.commit(request.table, request.chain, request.token_ids, request.num_computed)
        self.kv.release(request.table, discard=failed)
        request.table = None
        self.released_ids.append(request.request_id)
