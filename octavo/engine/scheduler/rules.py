"""Admission rules: what must hold before a waiting request starts. The scheduler asks them in order.

A rule sees the request and the step's plan. Features that limit who may start (adapters, media, grammars) are
rules added to the list; the scheduler itself knows none of them.
"""

from abc import ABC, abstractmethod

from octavo.engine.kvcache.manager import KVCacheManager, SharedPrefix
from octavo.engine.scheduler.plan import StepPlan
from octavo.engine.scheduler.request import Request, RequestStatus


class Rule(ABC):
    """One condition for starting."""

    keeps_place: bool = True
    """True when a refused request is one that smaller ones pass: they may do so only so often."""

    def is_full(self, plan: StepPlan) -> bool:
        """True when no request at all can start in this step any more."""
        return False

    @abstractmethod
    def admit(self, request: Request, plan: StepPlan) -> bool:
        """True when `request` may start in this step."""

    def charge(self, request: Request, plan: StepPlan) -> None:  # noqa: B027  # most rules count nothing
        """Note that `request` has started."""


class SeatRule(Rule):
    """No more than max_num_seqs requests run, those included that ended but are part of a step in flight."""

    def is_full(self, plan: StepPlan) -> bool:
        """No seat is left."""
        return plan.num_seats_left <= 0

    def admit(self, request: Request, plan: StepPlan) -> bool:
        """A seat is left."""
        return plan.num_seats_left > 0

    def charge(self, request: Request, plan: StepPlan) -> None:
        """Take a seat."""
        plan.num_seats_left -= 1


class LeaderRule(Rule):
    """A sibling of n > 1 waits until its leader has computed their prompt in an earlier step.

    When the leader is gone or has lost its blocks the sibling goes its own way.
    """

    keeps_place = False

    def admit(self, request: Request, plan: StepPlan) -> bool:
        """There is no leader to wait for."""
        leader = request.leader
        if leader is None or leader.status in (RequestStatus.FINISHED, RequestStatus.PREEMPTED):
            return True
        in_this_step = leader.num_computed == leader.num_prompt_tokens and leader.last_step_id == plan.step_id
        return leader.num_computed >= leader.num_prompt_tokens and not in_this_step


class BlockRule(Rule):
    """All tokens a request has must fit into the free blocks at once, less what it shares.

    So a long prompt does not start, fill the cache and lose it again. Leaves the shared beginning in
    `request.prefix`, from which it will start.
    """

    def __init__(self, kv: KVCacheManager, max_chunk: int) -> None:
        self._kv = kv
        self._max_chunk = max_chunk

    def admit(self, request: Request, plan: StepPlan) -> bool:
        """The blocks are there."""
        prefix = self._find_prefix(request)
        if not self._kv.can_start(prefix, request.num_tokens, self._max_chunk):
            return False
        request.prefix = prefix
        return True

    def _find_prefix(self, request: Request) -> SharedPrefix:
        if request.sampling.skip_reading_prefix_cache:
            return self._kv.nothing()
        leader = request.leader
        if leader is not None and leader.status is RequestStatus.RUNNING and leader.table is not None:
            forked = self._kv.fork(leader.table, request.num_prompt_tokens - 1)
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
        """No token is left."""
        return plan.num_tokens_left <= 0

    def admit(self, request: Request, plan: StepPlan) -> bool:
        """The tokens are there."""
        if self._split_prompts:
            return plan.num_tokens_left > 0
        assert request.prefix is not None
        return request.num_tokens - request.prefix.num_tokens <= plan.num_tokens_left
