"""Scheduler: who gets what in a step. Results are given by hand, so that each case is visible."""

import pytest

from octavo.base.errors import PromptTooLong, RequestError
from octavo.engine.scheduler import scheduler as module
from octavo.engine.scheduler.scheduler import Scheduler
from octavo.messages.kv import CachePlan
from octavo.messages.request import FinishReason
from octavo.messages.sampling import SamplingParams
from octavo.messages.step import ModelRunnerOutput
from tests.fakes import fake_config, fake_groups, fake_request


class Driver:
    """A scheduler, and results by hand: a request that samples gets token 5, or what `say` has for it."""

    def __init__(self, windows=(0,), num_blocks=33, block_size=4, max_model_len=64, caching=True, **options):
        options = {"max_num_seqs": 8, "max_num_batched_tokens": 64} | options
        config = fake_config(**options).scheduler
        plan = CachePlan(fake_groups(*windows), num_blocks, block_size)
        self.scheduler = Scheduler(config, plan, max_model_len, caching)
        self.tracker = self.scheduler._tracker
        self.steps = []

    def add(self, request_id, num_prompt, max_tokens=8, token=None, **fields):
        token = token if token is not None else len(self.tracker.requests) + 10
        fields.setdefault("arrival_s", float(len(self.tracker.requests)))
        self.scheduler.add(fake_request(request_id, [token] * num_prompt, max_tokens, **fields))

    def plan(self):
        """The next step as {request: tokens}; None when there is none."""
        step = self.scheduler.schedule()
        if step is None:
            return None
        parts = dict(zip(step.request_ids, step.num_scheduled_tokens, strict=True))
        samples = [
            self.tracker.requests[request_id].num_computed >= len(self.tracker.requests[request_id].token_ids)
            for request_id in step.request_ids
        ]
        self.steps.append((step, samples))
        return parts

    def read(self, say=None, errors=None, prompt_logprobs=None):
        step, samples = self.steps.pop(0)
        tokens = [
            [(say or {}).get(request_id, 5)] if sampled else []
            for request_id, sampled in zip(step.request_ids, samples, strict=True)
        ]
        result = ModelRunnerOutput(step.step_id, tokens, {}, prompt_logprobs or {}, errors or {})
        return self.scheduler.update(result)

    def run(self):
        parts = self.plan()
        self.read()
        return parts


def test_running_first_then_waiting_in_order():
    d = Driver(max_num_batched_tokens=16)
    d.add("a", 10)
    d.add("b", 10)
    assert d.run() == {"a": 10, "b": 6}
    d.add("c", 3)
    assert d.run() == {"a": 1, "b": 4, "c": 3}


def test_long_prompt_leaves_a_token_for_each_running_request_behind_it():
    d = Driver(max_num_batched_tokens=12, scheduling_policy="priority", max_num_seqs=4)
    d.add("decode1", 2, arrival_s=0)
    d.add("decode2", 2, arrival_s=1)
    d.run()
    d.add("urgent", 40, priority=-1, arrival_s=2)
    assert d.run() == {"decode1": 1, "decode2": 1, "urgent": 10}
    assert d.run() == {"decode1": 1, "urgent": 10, "decode2": 1}


def test_long_prefill_token_threshold_bounds_a_chunk():
    d = Driver(long_prefill_token_threshold=6)
    d.add("long", 14)
    d.add("short", 3)
    assert d.run() == {"long": 6, "short": 3}
    assert d.run() == {"long": 6, "short": 1}
    assert d.run() == {"long": 2, "short": 1}


def test_whole_prompts_only_without_chunking():
    d = Driver(enable_chunked_prefill=False, max_num_batched_tokens=20)
    d.add("a", 12)
    d.add("b", 12)
    d.add("c", 6)
    assert d.run() == {"a": 12, "c": 6}
    assert d.run() == {"a": 1, "c": 1, "b": 12}


def test_max_num_seqs_counts_requests_that_ended_in_flight():
    d = Driver(max_num_seqs=1)
    d.add("a", 4)
    d.add("b", 4)
    d.plan()
    d.plan()
    [out] = d.read({"a": 5})
    assert out.new_token_ids == [5]
    d.scheduler.abort(["a"])
    assert d.plan() is None, "a's slot is still in use by the step in flight"
    assert d.read() == []
    assert d.plan() == {"b": 4}
    assert d.steps[0][0].released_ids == ["a"]


def test_pending_tokens_are_scheduled_again_but_never_past_the_end():
    d = Driver()
    d.add("a", 4, max_tokens=3)
    assert [d.plan() for _ in range(4)] == [{"a": 4}, {"a": 1}, {"a": 1}, None]
    assert d.tracker.requests["a"].num_pending == 3
    ends = [out.finish_reason for _ in range(3) for out in d.read()]
    assert ends == [None, None, FinishReason.LENGTH]
    assert not d.scheduler.has_requests and d.scheduler.kv.pool.num_used == 0


def test_result_after_the_end_is_dropped_and_blocks_wait_for_it():
    d = Driver()
    d.add("a", 4, eos=[7])
    d.plan()
    d.plan()
    [out] = d.read({"a": 7})
    assert (out.finish_reason, out.stop_reason, out.new_token_ids) == (FinishReason.STOP, None, [7])
    assert d.scheduler.has_requests and d.scheduler.kv.pool.num_used == 2
    with pytest.raises(RequestError):
        d.add("a", 4)
    assert d.read() == []
    assert not d.scheduler.has_requests and d.scheduler.kv.pool.num_used == 0


def test_abort_in_every_state_is_silent_and_idempotent():
    d = Driver(num_blocks=9, max_num_seqs=2)
    for request_id in ("running", "flying", "waiting"):
        d.add(request_id, 8)
    d.run()
    d.plan()
    d.scheduler.abort(["waiting", "flying", "unknown"])
    d.scheduler.abort(["waiting", "flying"])
    assert [out.request_id for out in d.read()] == ["running"]
    d.scheduler.abort(["running", "flying"])
    assert not d.scheduler.has_requests and d.scheduler.kv.pool.num_used == 0
    assert d.plan() is None


def test_preemption_takes_the_last_and_it_resumes_before_later_arrivals():
    d = Driver(num_blocks=7)
    for request_id in ("a", "b", "c"):
        d.add(request_id, 7, max_tokens=12)
    assert d.run() == {"a": 7, "b": 7, "c": 7}
    assert d.run() == {"a": 1, "b": 1, "c": 1}
    d.add("later", 1)
    assert d.run() == {"a": 1, "b": 1}, "a took a block of c's, b the other; nothing starts in such a step"
    assert d.scheduler.stats().num_preemptions == 1
    d.scheduler.abort(["b"])  # c's slot was released with the step
    parts = d.plan()
    step = d.steps[0][0]
    assert list(parts)[:2] == ["a", "c"] and step.released_ids == ["b"]
    assert [new.request_id for new in step.new_requests] == ["c"], "it takes the last blocks"
    assert step.new_requests[0].token_ids == [12] * 7 + [5, 5], "it comes back with its outputs"
    assert step.new_requests[0].num_prompt_tokens == 7


def test_nothing_starts_in_a_step_that_preempted():
    d = Driver(num_blocks=7, scheduling_policy="priority")
    for request_id, num_prompt in (("a", 7), ("b", 5), ("c", 5)):
        d.add(request_id, num_prompt, max_tokens=6)
    d.run()
    d.run()
    d.add("urgent", 1, priority=-1)
    assert d.run() == {"a": 1, "b": 1} and d.scheduler.kv.pool.num_free == 1
    assert d.run() == {"a": 1, "b": 1, "urgent": 1}


def test_the_workers_own_what_they_were_sent():
    d = Driver()
    d.add("a", 4)
    d.plan()
    [new] = d.steps[0][0].new_requests
    blocks = d.steps[0][0].new_block_ids[0]
    d.read()
    d.run()
    assert new.token_ids == [10] * 4 and [len(ids) for ids in blocks] == [1]


def test_victim_in_flight_is_held_until_it_can_be_preempted():
    d = Driver(num_blocks=5, caching=False)
    d.add("a", 7, max_tokens=6)
    d.add("b", 7, max_tokens=6)
    assert d.plan() == {"a": 7, "b": 7}
    assert d.plan() == {"a": 1, "b": 1}
    assert d.plan() is None, "a needs a block; b has two steps in flight"
    d.read()
    assert d.plan() is None
    d.read()
    assert d.plan() == {"a": 1}
    assert d.scheduler.stats().num_preemptions == 1


def test_smaller_requests_pass_one_that_does_not_fit_but_only_so_often(monkeypatch):
    monkeypatch.setattr(module, "MAX_OVERTAKEN", 2)
    d = Driver(num_blocks=9)
    d.add("runs", 16, max_tokens=16)
    d.run()
    d.add("big", 20)
    for i in range(4):
        d.add(f"small{i}", 1, max_tokens=1)
    assert d.run() == {"runs": 1, "small0": 1, "small1": 1, "small2": 1}
    assert d.run() == {"runs": 1}, "three have passed: nobody else does"
    while "runs" in d.tracker.requests:
        d.run()
    assert d.run() == {"big": 20, "small3": 1}


def test_a_prompt_starts_only_when_all_of_it_fits():
    d = Driver(num_blocks=9, max_num_batched_tokens=8)
    d.add("a", 20, max_tokens=2)
    assert [d.run() for _ in range(2)] == [{"a": 8}, {"a": 8}]
    d.add("b", 20, max_tokens=2)
    assert d.run() == {"a": 4}
    assert d.run() == {"a": 1}
    assert d.run() == {"b": 8}


def test_what_can_never_fit_is_refused_with_numbers():
    d = Driver(num_blocks=9, max_model_len=64)
    d.add("fits", 30, max_tokens=3)
    with pytest.raises(PromptTooLong, match=r"30 tokens.*max_tokens \(4\) need 9 blocks.*engine has 8"):
        d.add("too long", 30, max_tokens=4)
    with pytest.raises(PromptTooLong, match="at least 1 and at most 63"):
        d.add("empty", 0)
    with pytest.raises(PromptTooLong, match="64 tokens"):
        d.add("no room", 64)
    with pytest.raises(RequestError, match="'fits' is in use"):
        d.add("fits", 1)
    assert list(d.tracker.requests) == ["fits"]


def test_window_groups_count_by_window_and_chunk():
    d = Driver(windows=(8,), num_blocks=8, max_num_batched_tokens=8, max_model_len=1000)
    d.add("endless", 200, max_tokens=700)
    while d.scheduler.has_requests:
        d.run()
    with pytest.raises(PromptTooLong):
        Driver(windows=(0, 8), num_blocks=8, max_num_batched_tokens=8, max_model_len=1000).add("a", 200, 700)


def test_without_chunking_the_whole_length_must_fit_a_step():
    d = Driver(enable_chunked_prefill=False, max_num_batched_tokens=20)
    d.add("fits", 10, max_tokens=11)
    with pytest.raises(PromptTooLong, match="exceed the 20 of one step"):
        d.add("a", 10, max_tokens=12)


def test_prefix_hits_are_counted_once_in_tokens():
    d = Driver(block_size=4)
    d.add("a", 10, token=1)
    d.add("b", 10, token=1)
    assert d.run() == {"a": 10, "b": 2}, "b shares in the very step that computes it"
    d.add("c", 9, token=1, sampling=SamplingParams(skip_reading_prefix_cache=True))
    d.add("d", 9, token=1, cache_salt="mine")
    assert d.run() == {"a": 1, "b": 1, "c": 9, "d": 9}
    stats = d.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (29, 8)


def test_siblings_wait_for_their_leader_then_fork():
    d = Driver(max_num_batched_tokens=8, caching=False)
    d.add("a", 10, token=1)
    for i in (1, 2):
        d.add(f"a{i}", 10, token=1, leader_id="a")
    d.add("other", 2)
    assert d.run() == {"a": 8}
    assert d.run() == {"a": 2, "other": 2}, "siblings do not stand in the way"
    parts = d.plan()
    step = d.steps[0][0]
    assert parts == {"a": 1, "other": 1, "a1": 1, "a2": 1}
    assert step.num_computed_tokens[2:] == [9, 9]
    leader, first, second = (step.new_block_ids.get(i, [[]])[0] for i in (0, 2, 3))
    assert leader == [] and first[:2] == second[:2] and first[2] != second[2]
    assert {target.number for _, target in step.block_copies} == {first[2], second[2]}
    assert len({source for source, _ in step.block_copies}) == 1
    assert [out.num_cached_tokens for out in d.read()] == [0, 0, 9, 9]


@pytest.mark.parametrize("fate", ["abort", "finish", "other prompt", "other salt", "unknown"])
def test_siblings_without_a_leader_go_their_own_way(fate):
    d = Driver(caching=False)
    if fate != "unknown":
        d.add("a", 6, max_tokens=1, token=1)
    options = {"token": 2 if fate == "other prompt" else 1, "cache_salt": "x" if fate == "other salt" else ""}
    d.add("b", 6, leader_id="a", **options)
    if fate == "abort":
        d.scheduler.abort(["a"])
    if fate == "finish":
        assert d.run() == {"a": 6}
    assert d.run()["b"] == 6


def test_error_of_one_request_ends_it_alone_and_its_blocks_are_not_shared():
    d = Driver()
    d.add("bad", 8, token=1)
    d.add("good", 8, token=2)
    d.plan()
    d.plan()
    bad, good = d.read(errors={"bad": "not a number"})
    assert (bad.finish_reason, bad.error, bad.new_token_ids) == (FinishReason.ERROR, "not a number", [])
    assert good.finish_reason is None
    assert [out.request_id for out in d.read()] == ["good"]
    d.add("same as bad", 8, token=1)
    d.add("same as good", 8, token=2)
    assert d.run() == {"good": 1, "same as bad": 8, "same as good": 4}


def test_prompt_logprobs_are_not_repeated_after_a_preemption():
    d = Driver(max_num_batched_tokens=4, caching=False)
    d.add("a", 10, sampling=SamplingParams(prompt_logprobs=0))
    d.plan()
    [out] = d.read(prompt_logprobs={"a": ["p1", "p2", "p3", "p4"]})
    assert (out.new_token_ids, out.prompt_logprobs) == ([], ["p1", "p2", "p3", "p4"])
    d.tracker.preempt(d.tracker.requests["a"])
    d.plan()
    [out] = d.read(prompt_logprobs={"a": ["p1", "p2", "p3", "p4"]})
    assert out.prompt_logprobs == []
    d.plan()
    [out] = d.read(prompt_logprobs={"a": ["p5", "p6", "p7", "p8"]})
    assert out.prompt_logprobs == ["p5", "p6", "p7", "p8"]


def test_several_tokens_of_one_step_are_cut_at_the_stop():
    d = Driver()
    d.add("a", 4, eos=[7])
    d.plan()
    step, _ = d.steps.pop()
    result = ModelRunnerOutput(step.step_id, [[5, 7, 6]], {"a": ["l1", "l2", "l3"]})
    [out] = d.scheduler.update(result)
    assert (out.new_token_ids, out.logprobs, out.finish_reason) == ([5, 7], ["l1", "l2"], FinishReason.STOP)


def test_missing_token_and_wrong_step_are_noticed():
    d = Driver()
    d.add("a", 4)
    d.plan()
    with pytest.raises(AssertionError, match="no token came for a"):
        d.scheduler.update(ModelRunnerOutput(0, [[]]))
    d = Driver()
    d.add("a", 4)
    d.plan()
    with pytest.raises(AssertionError, match="step 0 is due"):
        d.scheduler.update(ModelRunnerOutput(3, [[5]]))


def test_few_prompts_start_one_by_one_while_others_decode():
    big = {"num_blocks": 2000, "max_model_len": 2000, "max_num_batched_tokens": 4000, "max_num_seqs": 32}
    d = Driver(**big)
    for name in "ab":
        d.add(name, 300)
    assert d.run() == {"a": 300, "b": 300}, "nobody decodes yet"
    for name in "cde":
        d.add(name, 300)
    assert d.run() == {"a": 1, "b": 1, "c": 300}
    assert d.run() == {"a": 1, "b": 1, "c": 1, "d": 300}
    for name in "fg":
        d.add(name, 100)
    assert d.run() == {"a": 1, "b": 1, "c": 1, "d": 1, "e": 300}
    assert d.run() == {"a": 1, "b": 1, "c": 1, "d": 1, "e": 1, "f": 100, "g": 100}, "together not too long"
    for index in range(8):
        d.add(f"many{index}", 300)
    started = [sum(size == 300 for size in d.run().values()) for _ in range(5)]
    assert started == [4, 1, 1, 1, 1]
