"""Admission rules: what must hold before a waiting request starts. The scheduler asks them in order.

A rule sees the request and the step's plan. Features that limit who may start (adapters, media, grammars) are
rules added to the list; the scheduler itself knows none of them.
"""

from collections.abc import Sized

from octavo.config.scheduling import SchedulerConfig
from octavo.engine.kvcache.table import SharedPrefix
from octavo.engine.scheduler.plan import StepPlan
from octavo.engine.scheduler.request import Request, RequestStatus
from octavo.engine.scheduler.request_tracker import RequestTracker
from octavo.messages.request import FinishReason

FEW_WAITING, FEW_RUNNING = 4, 64
ENOUGH_TOKENS = 256
"""A step of so many takes about twice as long as one of a few, on a large GPU."""


class Rule:
    """One condition for starting; it may be that of a step's end alone."""

    keeps_place: bool = True
    """True when a refused request is one that smaller ones pass: they may do so only so often."""

    def is_full(self, plan: StepPlan) -> bool:
        """Return True if no request at all can start in this step any more."""
        return False

    def admit(self, request: Request, plan: StepPlan) -> bool:
        """Return True if `request` may start in this step, which is not full."""
        return True

    def make_room(self, order: list[Request], plan: StepPlan) -> None:
        """Preempt running requests in favour of waiting ones; they leave `order`, that of service."""


class SeatRule(Rule):
    """No more than max_num_seqs requests run, those included that ended but are part of a step in flight."""

    def is_full(self, plan: StepPlan) -> bool:
        return plan.num_seats_left <= 0


class BulkRule(Rule):
    """Those that came in bulk leave half of the seats to others, and half of the blocks that others want."""

    keeps_place = False

    def __init__(self, tracker: RequestTracker) -> None:
        self._tracker = tracker
        self._seats = tracker.bulk_seats

    def admit(self, request: Request, plan: StepPlan) -> bool:
        if not request.standing.in_bulk:
            return True
        return self._seats.has_room and (self._seats.num_beyond < 0 or not self._is_half_full)

    def make_room(self, order: list[Request], plan: StepPlan) -> None:
        """Preempt the last beyond their half: as many as others wait that find no seat, or no blocks.

        One that is part of a step in flight pauses until that is read.
        """
        seats = self._seats
        num_wanted = seats.num_others - (len(order) - seats.num_running)
        if seats.num_beyond <= 0 or num_wanted <= 0:
            return
        num_missing = min(num_wanted - (0 if self._is_half_full else plan.num_seats_left), seats.num_beyond)
        in_bulk = [request for request in order if request.standing.in_bulk]
        for request in in_bulk[len(in_bulk) - max(0, num_missing) :]:
            order.remove(request)
            if request.num_in_flight == 0:
                self._tracker.preempt(request)
                plan.num_seats_left += 1

    @property
    def _is_half_full(self) -> bool:
        return 2 * self._tracker.kv.num_used_blocks > self._tracker.kv.num_usable_blocks


class StaggeredPrefillRule(Rule):
    """While others compute their next tokens, the few prompts that wait start in steps of their own.

    Two prompts in one step would make everybody's next token late, so the second one waits for one step.
    Where many wait or run nothing is gained by that, and large steps serve all sooner.
    """

    def __init__(self, waiting: Sized) -> None:
        self._waiting = waiting

    def is_full(self, plan: StepPlan) -> bool:
        num_new = len(plan.new_requests)
        num_running = len(plan.requests) - num_new
        if not num_new or not 0 < num_running <= FEW_RUNNING or len(self._waiting) > FEW_WAITING:
            return False
        return sum(plan.num_scheduled[-num_new:]) >= ENOUGH_TOKENS


class LeaderRule(Rule):
    """A follower waits until its leader goes on from what they share, computed in an earlier step.

    When the leader has ended or lost its blocks the follower waits no more.
    """

    keeps_place = False

    def admit(self, request: Request, plan: StepPlan) -> bool:
        leader = request.leader
        if leader is None or leader.status in (RequestStatus.FINISHED, RequestStatus.PREEMPTED):
            return True
        return leader.num_computed_before >= request.num_prompt_tokens - 1


class AdapterRule(Rule):
    """Requests of one step have no more than max_loras different adapters; a refused one keeps its place.

    So requests with other adapters pass it only so often, and then those that run make room.
    """

    def __init__(self, tracker: RequestTracker, max_loras: int) -> None:
        self._tracker, self._most = tracker, max_loras

    def admit(self, request: Request, plan: StepPlan) -> bool:
        if (adapter := request.spec.adapter) is None:
            return True
        present = *self._tracker.running, *self._tracker.leaving
        keys = {other.spec.adapter.key for other in present if other.spec.adapter is not None}
        return adapter.key in keys or len(keys) < self._most


class BlockRule(Rule):
    """All tokens a request has must fit into the free blocks at once, less what it shares.

    So a long prompt does not start, fill the cache and lose it again. What ended requests hold gives way.
    Leaves the shared beginning in `request.prefix`, from which it will start.
    """

    def __init__(self, tracker: RequestTracker, max_chunk: int) -> None:
        self._kv = tracker.kv
        self._tracker = tracker
        self._max_chunk = max_chunk

    def admit(self, request: Request, plan: StepPlan) -> bool:
        while True:
            prefix = self._find_prefix(request)
            if self._kv.can_start(prefix, request.num_tokens, self._max_chunk):
                request.prefix = prefix
                return True
            if self._tracker.drop_oldest_retained():
                continue
            if plan.requests or self._tracker.leaving or not self._tracker.pins.drop_least():
                return False

    def _find_prefix(self, request: Request) -> SharedPrefix:
        if not request.sharing.reads_cache:
            return self._kv.nothing()
        leader = request.leader
        if leader is not None and leader.table is not None and leader.finish_reason is not FinishReason.ERROR:
            num_shared = min(request.num_prompt_tokens - 1, leader.num_computed)
            forked = self._kv.fork(leader.table, num_shared)
            if forked is not None:
                return forked
        return self._kv.match(request.chain, request.token_ids)


class TokenRule(Rule):
    """The step has tokens left; where prompts are not split, enough for all the request has to compute.

    Stands behind the BlockRule, which finds out how much that is.
    """

    def __init__(self, split_prompts: bool) -> None:
        self._split_prompts = split_prompts

    def is_full(self, plan: StepPlan) -> bool:
        return plan.num_tokens_left <= 0

    def admit(self, request: Request, plan: StepPlan) -> bool:
        if self._split_prompts:
            return True
        assert request.prefix is not None
        num_tokens = request.texts[0].num_tokens if request.texts else request.num_tokens
        return num_tokens - request.prefix.num_tokens <= plan.num_tokens_left


class ChunkRule(Rule):
    """Something can be computed: the media that come next fit into the step. Stands behind the BlockRule."""

    keeps_place = False

    def admit(self, request: Request, plan: StepPlan) -> bool:
        if (source := request.spec.source) is not None:
            return plan.encoder.take(source.key, source.num_tokens)
        if not request.spec.media:
            return True
        assert request.prefix is not None
        start, longest = request.prefix.num_tokens, min(plan.num_tokens_left, plan.longest_chunk)
        end = min(start + longest, request.num_tokens)
        return plan.encoder.cut(request.spec.media, start, end, start + longest) > start


def feature_rules(config: SchedulerConfig, tracker: RequestTracker) -> list[Rule]:
    """Return the rules of features, which ask nothing of requests that do not use them."""
    return [BulkRule(tracker), AdapterRule(tracker, config.max_loras)]
