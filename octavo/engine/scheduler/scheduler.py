"""`Scheduler`: who computes how many tokens in the next step. One rule, no phases.

Called by the engine core: `add`, `abort`, `schedule` (plan a step), `update` (read its result). Each
request's computed tokens chase its tokens; running requests are served first, then waiting ones, under a
token budget and the free blocks. Chunked prefill, shared prefixes and recomputing after preemption are the
same rule with other numbers (idea: vLLM's V1 scheduler). Knows no tensors and no features; those that limit
admission are rules in a list.

Steps may be given out before earlier ones were read: a token that is sampled but not read back counts as
pending. Masks that depend on such a token follow their step (`take_masks`).
"""

import time
from collections import deque
from collections.abc import Callable, Iterable

from octavo.base.errors import RequestError
from octavo.config.scheduling import SchedulerConfig
from octavo.engine.kvcache.manager import KVCacheManager
from octavo.engine.kvcache.pins import Pins
from octavo.engine.kvcache.table import BlockTable
from octavo.engine.scheduler import rules
from octavo.engine.scheduler.fit import check_fit
from octavo.engine.scheduler.plan import StepPlan
from octavo.engine.scheduler.policies import POLICIES
from octavo.engine.scheduler.prompt_pace import PromptPace
from octavo.engine.scheduler.request import Request, RequestStatus, hash_chain
from octavo.engine.scheduler.request_tracker import RequestTracker
from octavo.engine.scheduler.stops import take_given_outputs
from octavo.engine.scheduler.turns import StageTurns
from octavo.engine.scheduler.update import last_output, read_results, tokens_to_feed
from octavo.engine.speculation.lookahead import Lookahead
from octavo.engine.structured.matchers import RequestMatchers
from octavo.messages.kv import CachePlan
from octavo.messages.request import EngineOutput, EngineRequest, FinishReason, SchedulerStats
from octavo.messages.step import ModelRunnerOutput, NewRequest, SchedulerOutput, TokenMasks

MAX_OVERTAKEN = 64
"""Later requests that may start before one that does not fit; after that nothing starts before it."""
MAX_EXAMINED = 128
"""Waiting requests that a step refuses before it looks at no more."""


class Scheduler:
    """All requests of one engine, and the plan of its steps."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CachePlan,
        max_model_len: int,
        enable_prefix_caching: bool = True,
        matchers: RequestMatchers | None = None,
        num_stages: int = 1,
        pin_share: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """matchers: for constrained requests; num_stages: which take turns with the requests.

        pin_share: of the blocks, for beginnings that are to stay; clock: in seconds
        """
        self._turns = StageTurns(num_stages)
        self.kv = KVCacheManager(cache, enable_prefix_caching)
        self._config, self._max_model_len, self._max_chunk = config, max_model_len, config.max_chunk
        self._policy = POLICIES.load(config.scheduling_policy).from_config(config)
        self.pins = Pins(self.kv, pin_share, clock)
        self._tracker = RequestTracker(self.kv, self._policy, config.max_num_seqs, self.pins)
        self.requests = self._tracker.requests
        """Those that wait or run, by id."""
        self._rules: list[rules.Rule] = [
            rules.SeatRule(),
            rules.LeaderRule(),
            *rules.feature_rules(config, self._tracker),
            rules.BlockRule(self._tracker, self._max_chunk),
            rules.TokenRule(split_prompts=config.enable_chunked_prefill),
            rules.ChunkRule(),
            rules.StaggeredPrefillRule(self._tracker.waiting),
        ]
        self._admitting = [rule for rule in self._rules if type(rule).admit is not rules.Rule.admit]
        self._filling = [rule for rule in self._rules if type(rule).is_full is not rules.Rule.is_full]
        self._pace, self._matchers = PromptPace(), matchers
        self._lookahead = Lookahead(config, self.kv, num_stages)
        self._in_flight: deque[StepPlan] = deque()
        self._unmasked: StepPlan | None = None
        self._num_added = self._num_steps = self._num_timeouts = self._prefix_queries = self._prefix_hits = 0
        self._num_encodings = self._num_encoded = 0

    @property
    def has_requests(self) -> bool:
        """Return True while any request waits, runs or is part of a step in flight."""
        return bool(self._tracker.requests)

    @property
    def num_open(self) -> int:
        """Return how many requests wait, run, or are retained for those that follow them."""
        return len(self._tracker.requests) + len(self._tracker.retained) + self._tracker.num_texts

    def prepare(self, request: EngineRequest) -> None:
        """Read what other engines kept of its beginning; before `add`, on any one thread."""
        is_first = request.sharing.reads_cache and not request.sharing.leader_id
        if self.kv.shared.reads and is_first:
            chain, pull = hash_chain(request, self.kv.hash_block_size), self.kv.shared.puller(request)
            self.kv.prefetch(chain, request.prompt_token_ids, pull)

    def add(self, request: EngineRequest) -> None:
        """Accept a request. Raises PromptTooLong if it can never run, RequestError for an id in use."""
        self.kv.shared.take_in()
        self.kv.shared.check(request.request_id)
        if self._tracker.find(request.request_id) is not None:
            raise RequestError(f"Request id {request.request_id!r} is in use.", "request_id")
        check_fit(request, self.kv, self._config, self._max_model_len)
        entry = Request.create(request, self._num_added, self._max_model_len, self.kv.hash_block_size)
        if self._matchers is not None:
            entry.matcher = self._matchers.open_matcher(request)
        take_given_outputs(entry, request.given_output_ids)
        if (leader := self._tracker.find(request.sharing.leader_id)) and leader.can_lead(entry):
            entry.leader = leader
            leader.forks_states = self.kv.keeps_states
        self._num_added += 1
        self._tracker.add(entry)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests in any state, without an output; ended ones are let go, unknown ids skipped."""
        for request_id in request_ids:
            if (request := self._tracker.find(request_id)) is None:
                continue
            if request.is_finished:
                self._tracker.drop_retained(request)
            else:
                self._tracker.finish(request, FinishReason.ABORT)

    def time_out(self, request_ids: Iterable[str]) -> list[EngineOutput]:
        """End requests in any state, with an output that says so; ended and unknown ones are skipped."""
        outputs = []
        for request_id in request_ids:
            if (request := self._tracker.requests.get(request_id)) and not request.is_finished:
                self._tracker.finish(request, FinishReason.TIMEOUT)
                self._num_timeouts += 1
                outputs.append(last_output(request))
        return outputs

    def schedule(self) -> SchedulerOutput | None:
        """Plan the next step and count it as in flight; None when there is nothing to compute now."""
        tracker = self._tracker
        self.pins.expire()
        num_seats = self._config.max_num_seqs - len(tracker.running) - len(tracker.leaving)
        plan = StepPlan.of(self._config, self._num_steps, num_seats, self._max_chunk)
        order = tracker.running.in_order()
        for rule in self._rules:
            rule.make_room(order, plan)
        self._schedule_running(plan, order)
        if not plan.is_short_of_blocks:
            self._schedule_waiting(plan)
        if not tracker.waiting:
            self.kv.shared.clear()  # what was read for others that waited, nobody wants now
        if not plan.requests:
            return None
        self._lookahead.finish(plan)
        self._num_steps += 1
        self._in_flight.append(plan)
        self._unmasked = plan if plan.constrained else None
        step = plan.to_output(tracker.take_released(), self.kv.take_copies(), self.take_masks())
        step.block_contents, step.block_saves = self.kv.shared.take_leaving(), self.kv.take_saves()
        self._turns.end(plan)
        return step

    @property
    def awaits_masks(self) -> bool:
        """Return True if the last step went out without its masks; the next waits until they are taken."""
        return self._unmasked is not None

    @property
    def awaits_results(self) -> bool:
        """Return True if the next step gains by the tokens of those in flight, more than by being in time."""
        if self._turns.is_piped or not self._in_flight:  # stages compute other requests meanwhile
            return False
        return self._lookahead.awaits_results(self._tracker.running)

    def take_masks(self) -> TokenMasks | None:
        """Return the last step's masks, once; None if it has none, or while deciding tokens are not read."""
        plan = self._unmasked
        if plan is None or plan.awaits_tokens:
            return None
        self._unmasked = None
        assert self._matchers is not None
        return self._matchers.token_masks(plan.matchers())

    def update(self, result: ModelRunnerOutput, took_s: float = 0.0) -> list[EngineOutput]:
        """Read the result of the oldest step in flight, and learn from the time that it took."""
        plan = self._in_flight.popleft()
        num_tokens = self._config.max_num_batched_tokens - plan.num_tokens_left - plan.num_tokens_cut
        self._pace.note(num_tokens - len(plan.requests), took_s)
        if self._matchers is not None and plan.constrained:
            self._matchers.feed(tokens_to_feed(plan, result))
        outputs = read_results(plan, result, self._tracker)
        self._lookahead.learn(plan, result, took_s)
        self._num_encodings += result.num_encoded > 0
        self._num_encoded += result.num_encoded
        return outputs

    def preempt_all(self) -> None:
        """Take all blocks back: running requests will start anew. No step may be in flight."""
        self.pins.clear()
        while self._tracker.drop_oldest_retained():
            pass
        for request in self._tracker.running.in_order():
            self._tracker.preempt(request)

    def stats(self) -> SchedulerStats:
        """Return the state now, and the counters since the start."""
        stats = SchedulerStats(
            num_running=len(self._tracker.running),
            num_waiting=len(self._tracker.waiting) + self._tracker.num_texts,
            num_blocks_used=self.kv.num_used_blocks,
            num_blocks=self.kv.num_usable_blocks,
            num_preemptions=self._tracker.num_preemptions,
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            num_steps=self._num_steps,
            num_timeouts=self._num_timeouts,
            num_blocks_swapped_out=self.kv.host.num_stored,
            num_blocks_swapped_in=self.kv.host.num_loaded,
            external_queries=self.kv.num_asked_tokens,
            external_hits=self.kv.num_received_tokens,
            num_blocks_pinned=self.pins.num_blocks,
            num_encodings=self._num_encodings,
            num_encoded=self._num_encoded,
        )
        self._lookahead.count(stats)
        return stats

    def _schedule_running(self, plan: StepPlan, order: list[Request]) -> None:
        """Serve running requests in `order`; each leaves a token for every one behind it."""
        ahead = self._lookahead.begin(order)
        turns = self._turns.begin(order, plan.step_id)
        for served, request in enumerate(order, 1):  # who loses its blocks leaves at the end of `order`
            if plan.num_tokens_left <= 0:
                return
            if turns and turns.leaves_out(request, plan):
                continue
            num_behind = len(order) - served
            guesses = ahead.get(request) if ahead else None
            if guesses is not None and not self._lookahead.extend(plan, request, guesses, num_behind):
                continue
            if request.num_computed < request.routine_until:
                plan.add(request, 1)
                continue
            if not (num_new := self._next_part(request, plan, num_behind)):
                continue
            table = request.table
            assert table is not None
            if request.forks_states and request.num_computed == request.num_prompt_tokens - 1:
                self.kv.keep_fork(table, request.num_computed)
            if request.num_computed + num_new <= table.capacity:
                self._take(plan, request, num_new)
            elif (new_blocks := self._blocks_for(request, table, num_new, order, plan)) is not None:
                self._take(plan, request, num_new, new_blocks)

    def _next_part(self, request: Request, plan: StepPlan, num_behind: int) -> int:
        """Tokens of a running request to compute; 0 while it waits, or its last token is pending."""
        if (num_tokens := request.num_tokens) >= request.max_total_tokens:
            return 0
        if (num_new := num_tokens - request.num_computed) <= 1:
            return num_new
        self._pace_prompts(plan, num_behind)
        room = max(1, plan.num_tokens_left - num_behind)
        return plan.next_chunk(request, min(room, self._max_chunk))

    def _pace_prompts(self, plan: StepPlan, num_behind: int = 0) -> None:
        """Cut what prompts may add if others' tokens are watched for; `num_behind` are still to be served."""
        if plan.is_paced or not self._config.enable_chunked_prefill:
            return
        plan.is_paced = True
        if any(request.is_watched and request.is_decoding for request in self._tracker.running):
            cut = max(0, plan.num_tokens_left - num_behind - self._pace.num_tokens())
            plan.num_tokens_left -= cut
            plan.num_tokens_cut = cut

    def _blocks_for(
        self, request: Request, table: BlockTable, num_new: int, order: list[Request], plan: StepPlan
    ) -> list[list[int]] | None:
        """New blocks for a running request whose table is full; None if it must wait.

        If need be they are taken from ended requests that hold some, then from the running ones behind it.
        Whoever loses its blocks, or would but for a step in flight, is removed from the end of `order`.
        """
        if plan.is_blocked:
            return None
        while True:
            new_blocks = self.kv.reserve(table, request.num_computed, num_new)
            if new_blocks is not None:
                return new_blocks
            if self._tracker.drop_oldest_retained():
                continue
            plan.is_short_of_blocks = True
            if order[0] is request and len(order) == 1 and self.pins.drop_least():
                continue  # it would wait for ever
            victim = order[-1]
            if victim is not request:
                order.pop()
                if victim.num_in_flight == 0:
                    self._tracker.preempt(victim)
                    continue
            plan.is_blocked = True
            return None

    def _schedule_waiting(self, plan: StepPlan) -> None:
        """Start waiting requests in order. One that does not fit lets others pass, but only so often."""
        if self._is_full(plan) or not self._tracker.waiting:
            return
        self._pace_prompts(plan)
        passed: list[Request] = []
        for request in self._offered():
            refusing = next((rule for rule in self._admitting if not rule.admit(request, plan)), None)
            if refusing is None:
                self._start(request, plan)
                for earlier in self._waiting_before(request) if self._policy.asks_cache else passed:
                    earlier.num_overtaken += 1
                if self._is_full(plan):
                    return
            elif refusing.keeps_place:
                has_waited = request.num_overtaken >= MAX_OVERTAKEN
                if has_waited or request.status is RequestStatus.PREEMPTED or len(passed) == MAX_EXAMINED:
                    return
                passed.append(request)

    def _offered(self) -> Iterable[Request]:
        """Return the first waiting requests in the order in which they may start.

        Before those that the policy finds worth more to start now come those that lost their blocks, and
        those that were overtaken as often as is allowed.
        """
        asks = self._policy.asks_cache
        waiting = self._tracker.waiting.first(MAX_EXAMINED + (0 if asks else self._config.max_num_seqs))
        return sorted(waiting, key=self._disadvantage) if asks else waiting

    def _disadvantage(self, request: Request) -> tuple[bool, float]:
        if request.status is RequestStatus.PREEMPTED or request.num_overtaken >= MAX_OVERTAKEN:
            return (False, 0.0)
        near = request.num_cached_blocks
        request.num_cached_blocks = self.kv.count_cached(request.chain, request.token_ids, near)
        return (True, -self._policy.worth(request, request.num_cached_blocks))

    def _waiting_before(self, request: Request) -> list[Request]:
        """Those of the first waiting requests that came before one that has just started."""
        came = (request.standing.arrival_s, request.sequence)
        first = self._tracker.waiting.first(MAX_EXAMINED)
        return [other for other in first if (other.standing.arrival_s, other.sequence) < came]

    def _is_full(self, plan: StepPlan) -> bool:
        return any(rule.is_full(plan) for rule in self._filling)

    def _start(self, request: Request, plan: StepPlan) -> None:
        """Let an admitted request run, from the beginning that it shares."""
        prefix, request.prefix = request.prefix, None
        assert prefix is not None
        if request.texts:
            num_new = plan.add_texts(request)
            self._tracker.start(request)
            if self._policy.takes_turns:
                self._policy.charge(request, num_new)
            return
        request.table = self.kv.open(prefix)
        request.num_computed = prefix.num_tokens
        if len(self.pins):
            self.pins.touch(request.chain.digests[: prefix.num_tokens // self.kv.hash_block_size])
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = min(prefix.num_tokens, request.num_prompt_tokens)
            self._prefix_queries += prefix.num_queried
            self._prefix_hits += prefix.num_tokens if prefix.num_queried else 0
        num_new = plan.next_chunk(request, min(plan.num_tokens_left, self._max_chunk))
        reserved = self.kv.reserve(request.table, request.num_computed, num_new)
        assert reserved is not None, "an admitted request found no blocks"
        self._tracker.start(request)
        plan.num_seats_left -= 1
        token_ids, num_prompt = request.token_ids.copy(), request.num_prompt_tokens
        plan.new_requests.append(NewRequest(request.request_id, token_ids, num_prompt, request.spec))
        self._take(plan, request, num_new, [blocks.copy() for blocks in request.table.groups])
        request.num_computed_before = 0  # what it shares may only be computed in this step: too early to copy

    def _take(
        self, plan: StepPlan, request: Request, num_new: int, new_blocks: list[list[int]] | None = None
    ) -> None:
        """Give `request` its part of the step, and enter the blocks that it fills into the prefix map.

        A request that starts in this very step may share them: in each layer a step writes before it reads.
        """
        plan.add(request, num_new, new_blocks)
        table, num_computed = request.table, request.num_computed
        assert table is not None
        if num_computed // self.kv.hash_block_size > table.num_committed:
            self.kv.commit(table, request.chain, request.token_ids, num_computed)
        if (published := request.num_published) < (num_prompt := request.num_prompt_tokens):
            computed = range(published, min(num_computed, num_prompt))
            self.kv.publish(table, request.chain, computed, num_prompt, request.sharing.target)
            request.num_published = computed.stop
        if self._policy.takes_turns:
            self._policy.charge(request, num_new)
        else:
            request.expect_routine(self.kv.hash_block_size)
