"""Core, scheduler and KV cache under random traffic, against the invariants of a serving engine.

Hypothesis drives one engine over a FakeExecutor: requests with shared beginnings, salts, priorities,
siblings, tenants, aborts, timeouts, cache resets, requests held for followers, in a pool so small that
preemption is normal, with and without a host tier.
After every rule the whole bookkeeping is checked against an independent recount; every finished request's
output is compared with what it gives alone. OCTAVO_MACHINE_EXAMPLES=2000 runs as many examples.
"""

import logging
import os
from array import array
from collections import Counter
from hashlib import sha256

from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.engine.core import EngineCore
from octavo.engine.kvcache.groups import CacheGroup
from octavo.engine.scheduler.request import RequestStatus
from octavo.messages.kv import CachePlan
from octavo.messages.request import FinishReason, Retention
from octavo.messages.sampling import SamplingParams
from tests.fakes import (
    FakeExecutor,
    expected_output,
    extend_digest,
    fake_config,
    fake_groups,
    fake_request,
    free_blocks,
)

VOCAB = 12
MAX_MODEL_LEN = 40
LAYOUTS = [(windows, (1,) * len(windows)) for windows in [(0,), (0, 5), (4,), (0, 3, 8), (7, 2), (0, 1)]]
LAYOUTS += [((0, 5), (2, 1)), ((3, 0), (3, 1)), ((0, 8, 0), (1, 2, 3)), ((7, 0), (2, 3))]
"""Windows of the groups, and their heads: what has fewer has more slots per block."""
BEGINNINGS = [[1] * 9, [1] * 9 + [2] * 8, [3, 4, 5, 6] * 4, []]


class Drafts:
    """Guesses what comes; every third token is wrong."""

    def __init__(self, most, machine):
        self.most, self.machine, self.turn = most, machine, 0

    def propose(self, running):
        drafts = {}
        for request in running:
            num_ahead = request.num_pending + request.num_unsure
            if num_ahead and self.machine.config.scheduler.steps_in_flight != 2:
                continue
            if request.num_computed + 1 != len(request.token_ids) + request.num_pending:
                continue
            num_known = request.num_output_tokens + num_ahead
            room = min(self.most, request.max_total_tokens - len(request.token_ids) - num_ahead - 1)
            expected = self.machine.expected[request.request_id][0][num_known:][: max(0, room)]
            self.turn += 1
            wrong = self.turn % 3
            drafts[request] = [(t + (i % 3 == wrong)) % VOCAB for i, t in enumerate(expected)]
        return {request: tokens for request, tokens in drafts.items() if tokens}

    def awaits_results(self, running):
        return self.turn % 2 == 1 or any(request.num_unsure for request in running)

    def counts_behind(self, plan):
        return [self.most] * len(plan.requests)

    def learn(self, plan, result, took_s):
        pass

    def count(self, stats):
        pass


class EngineMachine(RuleBasedStateMachine):
    """One engine and everything it was asked."""

    @initialize(
        layout=st.sampled_from(LAYOUTS),
        block_size=st.sampled_from([1, 2, 4]),
        spare_blocks=st.integers(0, 16),
        steps_in_flight=st.integers(1, 3),
        max_num_seqs=st.integers(1, 6),
        budget=st.sampled_from([6, 9, 16, 48]),
        threshold=st.sampled_from([0, 0, 5]),
        chunked=st.booleans(),
        caching=st.sampled_from([True, True, True, False]),
        policy=st.sampled_from(["fcfs", "priority", "deadline", "fair", "lpm"]),
        aging=st.sampled_from([0.0, 2.0]),
        host_blocks=st.sampled_from([0, 0, 1, 3, 40]),
        drafts=st.sampled_from([0, 0, 1, 3, 9]),
        ahead=st.sampled_from([0, 4]),
        pin_share=st.sampled_from([0.0, 0.4, 1.0]),
    )
    def start(
        self,
        layout,
        block_size,
        spare_blocks,
        steps_in_flight,
        max_num_seqs,
        budget,
        threshold,
        chunked,
        caching,
        policy,
        aging,
        host_blocks,
        drafts,
        ahead,
        pin_share,
    ):
        self.now = 0.0
        self.most_drafts = drafts * steps_in_flight + ahead
        self.config = fake_config(
            block_size=block_size,
            num_blocks=1,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget if chunked else 48,
            long_prefill_token_threshold=threshold if chunked else 0,
            enable_chunked_prefill=chunked,
            steps_in_flight=steps_in_flight,
            enable_prefix_caching=caching,
            scheduling_policy=policy,
            priority_aging_s=aging,
            fair_weights={"a": 2.0},
            max_request_seconds=200.0,
        )
        windows, heads = layout
        groups = fake_groups(*windows, heads=heads)
        block_size *= 2 if max(heads) == 3 else 1
        chunk = self.config.scheduler.max_chunk
        smallest = sum(
            group.peak_blocks(MAX_MODEL_LEN - 1, chunk)
            for group in CacheGroup.all_of(CachePlan(groups, 1, block_size))
        )
        num_blocks = 1 + smallest + spare_blocks
        self.config = fake_config(
            **vars(self.config.scheduler),
            block_size=block_size,
            num_blocks=num_blocks,
            max_model_len=MAX_MODEL_LEN,
            enable_prefix_caching=caching,
            cache={
                "prefix_pin_share": pin_share,
                "swap_space": host_blocks * block_size * 64 * max(heads) / 2**30,
            },
        )
        self.executor = FakeExecutor(groups, vocab_size=VOCAB)
        self.core = EngineCore(self.config, self.executor, clock=lambda: self.now)
        self.core.start()
        logging.getLogger("octavo").setLevel(logging.ERROR)
        self.scheduler, self.kv = self.core.scheduler, self.core.scheduler.kv
        self.tracker = self.scheduler._tracker
        if drafts:
            self.scheduler._lookahead.drafting = Drafts(drafts, self)
            self.scheduler._lookahead._num_ahead = ahead
        self._plan = self.scheduler.schedule
        self.scheduler.schedule = self.watched_schedule

        self.requests = {}
        self.expected = {}
        self.outputs = {}
        self.prompt_logprobs = Counter()
        self.ended = {}
        self.aborted = set()
        self.computed = {}
        self.identity = {}
        self.num_tokens_asked = 0

    # Rules

    @rule(
        beginning=st.sampled_from(BEGINNINGS),
        tail=st.lists(st.integers(0, 3), max_size=9),
        max_tokens=st.integers(1, 14),
        n=st.sampled_from([1, 1, 1, 2, 4]),
        priority=st.integers(0, 2),
        salt=st.sampled_from(["", "", "a", "\ud800"]),
        haste=st.integers(0, 3),
        eos=st.sampled_from([[], [7]]),
        stops=st.sampled_from([None, [8, 9]]),
        min_tokens=st.integers(0, 3),
        prompt_logprobs=st.sampled_from([None, None, None, 1]),
        error_at=st.sampled_from([None] * 7 + [1]),
        hold=st.booleans(),
        tenant=st.sampled_from("abc"),
        timeout_s=st.sampled_from([None] * 4 + [4.0, 12.0]),
        in_bulk=st.sampled_from([False, False, True]),
        retention=st.sampled_from([None, None, Retention(3.0, 1), Retention(30.0), Retention(9.0, 5, True)]),
    )
    def add(
        self,
        beginning,
        tail,
        max_tokens,
        n,
        priority,
        salt,
        haste,
        eos,
        stops,
        min_tokens,
        prompt_logprobs,
        error_at,
        hold,
        tenant,
        timeout_s,
        in_bulk,
        retention,
    ):
        prompt = beginning + tail or [1]
        max_tokens = min(max_tokens, MAX_MODEL_LEN - len(prompt))
        number = len(self.requests)
        for child in range(n):
            request = fake_request(
                f"r{number}.{child}",
                prompt,
                max_tokens,
                seed=number % 3 + child,
                eos=eos,
                arrival_s=float(number - haste),
                priority=priority,
                cache_salt=salt,
                leader_id=f"r{number}.0" if child else "",
                hold=hold,
                tenant=tenant,
                in_bulk=in_bulk,
                retention=retention,
                sampling=SamplingParams(
                    max_tokens=max_tokens,
                    timeout_s=timeout_s,
                    min_tokens=min(min_tokens, max_tokens),
                    stop_token_ids=stops,
                    prompt_logprobs=prompt_logprobs,
                ),
            )
            if error_at is not None and child == n - 1:
                self.executor.errors[request.request_id] = error_at
            self.send(request)
            if child:
                self.core.add(request)  # a duplicate changes nothing

    def send(self, request):
        self.requests[request.request_id] = request
        self.outputs[request.request_id] = []
        self.num_tokens_asked += len(request.prompt_token_ids) + request.limits.max_tokens
        self.expected[request.request_id] = expected_output(request, MAX_MODEL_LEN, VOCAB)
        self.name_blocks(request)
        self.core.add(request)

    @precondition(lambda self: self.requests)
    @rule(
        data=st.data(),
        token=st.integers(0, 3),
        back=st.sampled_from([0, 0, 0, 1, 2]),
        max_tokens=st.sampled_from([1, 1, 3]),
        hold=st.booleans(),
        n=st.integers(1, 3),
    )
    def follow(self, data, token, back, max_tokens, hold, n):
        """Go on from what a request has so far, whatever its state, with another token."""
        held = list(self.tracker.retained)
        leader = self.requests[data.draw(st.sampled_from(held or sorted(self.requests)))]
        known = leader.prompt_token_ids + self.outputs[leader.request_id]
        prompt = [*known[: len(known) - 1 - back], token]
        max_tokens = min(max_tokens, MAX_MODEL_LEN - len(prompt))
        if max_tokens < 1:
            return
        number = len(self.requests)
        for child in range(n):
            self.send(
                fake_request(
                    f"f{number}.{child}",
                    [*prompt[:-1], token + child],
                    max_tokens,
                    arrival_s=float(number),
                    cache_salt=leader.sharing.cache_salt,
                    leader_id=leader.request_id,
                    hold=hold,
                    sampling=SamplingParams(max_tokens=max_tokens),
                )
            )

    @rule(seconds=st.floats(0.5, 9.0))
    def wait(self, seconds):
        self.now += seconds

    @rule(count=st.integers(1, 8))
    def step(self, count):
        for _ in range(count):
            if self.core.has_work():
                self.one_step()

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), also_unknown=st.booleans())
    def abort(self, data, also_unknown):
        ids = data.draw(st.lists(st.sampled_from(sorted(self.requests)), max_size=4))
        self.core.abort([*ids, "unknown"] if also_unknown else ids)
        self.aborted |= {request_id for request_id in ids if request_id not in self.ended}

    @rule()
    def reset_prefix_cache(self):
        assert self.core.call("reset_prefix_cache", {}) is True
        assert not self.kv.pool._by_key and not self.kv.host._cells

    @rule()
    def drain(self):
        """I-9, I-15: everything ends in bounded work, and nothing is left."""
        for _ in range(100 + 40 * self.num_tokens_asked):
            if not self.core.has_work():
                break
            self.one_step()
        assert not self.core.has_work(), "the engine does not come to an end"
        assert set(self.ended) | self.aborted == set(self.requests)
        assert set(self.tracker.retained) <= set(self.ended)
        self.core.abort(list(self.tracker.retained))
        assert not len(self.tracker.retained)
        assert self.kv.pool.num_used == self.scheduler.pins.num_blocks
        self.now += 100
        assert not self.scheduler.pins.all(), "their time is over"
        assert self.kv.pool.num_used == 0
        assert self.kv.pool.num_free == self.kv.num_usable_blocks
        assert not self.tracker.requests and not self.tracker.leaving
        assert not len(self.tracker.waiting) and not len(self.tracker.running)
        assert set(self.executor.rows) == set(self.tracker.released_ids)

    def teardown(self):
        if hasattr(self, "core"):
            self.drain()
            self.bookkeeping_is_sound()

    # What happens in a step

    def one_step(self):
        num_steps = len(self.executor.steps)
        had_requests = any(
            not r.is_finished and self.now < self.end_s(r.request_id) for r in self.tracker.requests.values()
        )
        outputs = self.core.step()
        assert all(
            r.is_finished or self.now < self.end_s(r.request_id) for r in self.tracker.requests.values()
        )
        assert len(self.executor.steps) > num_steps or not had_requests, "I-15: no token was computed"
        for output in outputs.outputs:
            self.take(output)

    def end_s(self, request_id):
        """When this request's time is over."""
        request = self.requests[request_id]
        return request.standing.arrival_s + (request.limits.timeout_s or 200.0)

    def take(self, output):
        """I-12, I-13, I-17: one end, nothing after it, and the tokens of an undisturbed run."""
        request_id = output.request_id
        assert request_id not in self.ended and request_id not in self.aborted
        request = self.requests[request_id]
        self.outputs[request_id] += output.new_token_ids
        assert 0 <= output.num_cached_tokens < len(request.prompt_token_ids)  # I-8
        self.prompt_logprobs[request_id] += len(output.prompt_logprobs or ())
        tokens, reason, stop = self.expected[request_id]
        assert self.outputs[request_id] == tokens[: len(self.outputs[request_id])]
        if output.finish_reason is None:
            return
        self.ended[request_id] = output.finish_reason
        if output.finish_reason is FinishReason.ERROR:
            assert len(self.outputs[request_id]) == self.executor.errors[request_id] and output.error
            return
        if output.finish_reason is FinishReason.TIMEOUT:
            assert self.now >= self.end_s(request_id) and not output.new_token_ids
            return
        assert (self.outputs[request_id], output.finish_reason, output.stop_reason) == (tokens, reason, stop)
        if request.spec.sampling.prompt_logprobs is not None:
            assert self.prompt_logprobs[request_id] == len(request.prompt_token_ids) - 1

    def all_waiting(self):
        queue = self.tracker.waiting
        return [
            entry[2] for lines in (queue._lines, queue._bulk) for line in lines.values() for entry in line
        ]

    def watched_schedule(self):
        """I-13, I-14, I-16 on every planned step."""
        running = [r for r in self.tracker.requests.values() if r.status is RequestStatus.RUNNING]
        oldest = min(running, key=lambda r: (r.standing.arrival_s, r.sequence), default=None)
        step = self._plan()
        assert oldest is None or oldest.status is not RequestStatus.PREEMPTED
        if step is None:
            return None
        note(f"step {step.step_id}: {dict(zip(step.request_ids, step.num_scheduled_tokens, strict=True))}")
        limits = self.config.scheduler
        assert 0 < step.num_tokens <= limits.max_num_batched_tokens
        assert len(self.tracker.running) + len(self.tracker.leaving) <= limits.max_num_seqs
        num_bulk = sum(request.standing.in_bulk for request in self.tracker.running)
        open_requests = [r for r in self.tracker.requests.values() if not r.is_finished]
        if any(self.tracker.requests[new.request_id].standing.in_bulk for new in step.new_requests):
            is_alone = all(r.standing.in_bulk for r in open_requests)
            assert is_alone or num_bulk <= max(1, limits.max_num_seqs // 2)
        assert not self.aborted & set(step.request_ids)
        assert all(0 < count <= limits.max_chunk for count in step.num_scheduled_tokens)
        key, line = self.scheduler._policy.key, self.scheduler._policy.line
        for new in step.new_requests:
            started = self.tracker.requests[new.request_id]
            self.computed[new.request_id] = 0  # it may have been preempted since the last look
            for waiting in self.all_waiting():
                place = (key(waiting), waiting.sequence)
                assert (
                    waiting.status is not RequestStatus.PREEMPTED
                    or waiting.standing.in_bulk
                    or line(waiting) != line(started)
                    or place > (key(started), started.sequence)
                )
        return step

    # What holds at any time

    @invariant()
    def bookkeeping_is_sound(self):
        if not hasattr(self, "core"):
            return
        self.check_blocks()
        self.check_requests()
        self.check_prefix_map()

    def check_blocks(self):
        """I-1 to I-4, from a recount of the tables."""
        pool, pins = self.kv.pool, self.scheduler.pins
        holders = Counter(block for pin in pins._pins.values() for block in pin.blocks)
        assert len(holders) == pins.num_blocks <= pins.most_blocks
        for pin in pins._pins.values():
            assert all(pool._keys[block] is not None for block in pin.blocks), "what is pinned is known"
        salts = {}
        for request in [*self.tracker.requests.values(), *self.tracker.retained.values()]:
            if request.table is None:
                continue
            for group, blocks, first_live in zip(
                self.kv.groups, request.table.groups, request.table.first_live, strict=True
            ):
                size = group.block_size
                most = request.num_computed + self.most_drafts
                assert -(-request.num_computed // size) <= len(blocks) <= -(-most // size)
                assert request.num_computed <= request.table.capacity <= len(blocks) * size
                assert not any(blocks[:first_live]) and all(blocks[first_live:])
                assert first_live <= group.first_needed(max(0, request.num_computed - 1))
                holders.update(blocks[first_live:])
                for index, block in enumerate(blocks):
                    if block:
                        place = salts.setdefault(block, (request.chain.root, group.index, index))
                        assert place == (request.chain.root, group.index, index), "a block means two things"
                        assert pool.ref_count(block) == 1 or (index + 1) * size <= request.num_computed
        free = free_blocks(pool)
        assert len(free) == len(set(free)) == pool.num_free
        assert set(free) | set(holders) == set(range(1, pool.num_blocks))
        assert not set(free) & set(holders)
        assert all(pool.ref_count(block) == holders[block] for block in range(pool.num_blocks))

    def check_requests(self):
        """I-11, I-18: each request in one place, its counts in order."""
        waiting, running = (
            self.all_waiting(),
            self.tracker.running._members,
        )
        assert len(set(waiting)) == len(waiting)
        for request_id, request in self.tracker.requests.items():
            is_waiting, is_running = request in waiting, request in running
            is_leaving = request in self.tracker.leaving
            assert is_waiting + is_running + is_leaving == 1
            assert is_waiting == (request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED))
            assert is_running == (request.status is RequestStatus.RUNNING)
            assert is_leaving == request.is_finished
            assert is_waiting == (request.table is None)
            assert not is_leaving or request.num_in_flight > 0
            assert request.num_in_flight <= self.config.scheduler.steps_in_flight
            assert is_leaving or 0 <= request.num_pending <= request.num_in_flight
            assert request.num_computed <= request.num_tokens <= min(request.max_total_tokens, MAX_MODEL_LEN)
            assert is_waiting or request.num_computed >= self.computed.get(request_id, 0)
            self.computed[request_id] = 0 if is_waiting else request.num_computed
        assert len(waiting) + len(running) + len(self.tracker.leaving) == len(self.tracker.requests)
        for request in self.tracker.retained.values():
            assert request.request_id not in self.tracker.requests
            assert request.is_finished and request.num_in_flight == 0 and request.table is not None
            assert self.requests[request.request_id].sharing.hold and request.request_id not in self.aborted
            assert request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)

    def check_prefix_map(self):
        """I-5, I-6: what a key promises is what the block holds, seen from the runner's side."""
        remembered = self.kv.pool._by_key
        assert len(set(remembered.values())) == len(remembered)
        assert remembered.keys() <= {
            (digest, group.index) for digest in self.identity for group in self.kv.groups
        }
        if not self.core._in_flight and not self.kv.copies:  # those of a pin go with the next step
            for (digest, group), block in remembered.items():
                assert self.last_of(block, group) == self.identity[digest]
        host = self.kv.host
        contents = host._cells
        assert len(set(contents.values())) == len(contents) == len(host._keys) - len(host._free)
        assert contents.keys() <= {
            (digest, group.index) for digest in self.identity for group in self.kv.groups
        }
        if not self.core._in_flight and not self.kv.copies:
            for (digest, group), cell in contents.items():
                assert self.last_of(self.kv.pool.num_blocks + cell, group) == self.identity[digest]

    def last_of(self, block, group):
        """What the runner holds at the end of a block."""
        return self.executor.memory[block][self.kv.groups[group].block_size - 1]

    def name_blocks(self, request):
        """An own computation of the digests of its full blocks, with what the runner must hold for each."""
        salt = request.sharing.cache_salt.encode("utf-8", "surrogatepass")
        digest = sha256(len(salt).to_bytes(8, "little") + salt).digest()
        token_ids = request.prompt_token_ids + self.expected[request.request_id][0]
        size, prefix = self.kv.hash_block_size, 0
        for start in range(0, len(token_ids) - size + 1, size):
            tokens = token_ids[start : start + size]
            digest = sha256(digest + array("q", tokens).tobytes()).digest()
            for token in tokens:
                prefix = extend_digest(prefix, token)
            self.identity[digest] = prefix


EngineMachine.TestCase.settings = settings(
    max_examples=int(os.environ.get("OCTAVO_MACHINE_EXAMPLES", "150")),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestEngineMachine = EngineMachine.TestCase
