"""Time limits: the bookkeeping of ends, and the end of requests in every state, on a clock moved by hand."""

import random

import pytest

from octavo.engine.core import EngineCore
from octavo.engine.timeouts import Timeouts
from octavo.messages.request import FinishReason
from octavo.messages.sampling import SamplingParams
from tests.fakes import FakeExecutor, expected_output, fake_config, fake_request


def limited(request_id, timeout_s, prompt=(1, 2, 3), max_tokens=8, **fields):
    sampling = SamplingParams(max_tokens=max_tokens, timeout_s=timeout_s)
    return fake_request(request_id, list(prompt), max_tokens, sampling=sampling, **fields)


class Clocked:
    """An engine core, and what each request got, on a clock of its own."""

    def __init__(self, **options):
        self.now = 0.0
        self.core = EngineCore(fake_config(**options), FakeExecutor(), clock=lambda: self.now)
        self.core.start()
        self.tokens, self.ends = {}, {}

    def add(self, *requests):
        for request in requests:
            self.core.add(request)

    def step(self, count=1, seconds=0.0):
        for _ in range(count):
            for output in self.core.step().outputs:
                assert output.request_id not in self.ends
                self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.finish_reason is not None:
                    self.ends[output.request_id] = output.finish_reason
            self.now += seconds

    def drain(self):
        while self.core.has_work():
            self.step()
        assert self.core.scheduler.kv.pool.num_used == 0 and not self.core.scheduler.has_requests


def test_ends_come_in_order_and_once():
    timeouts = Timeouts(max_request_s=10.0)
    assert timeouts.next_s() is None and timeouts.take_late(1e9) == []
    timeouts.add(limited("a", 5.0, arrival_s=1.0))
    timeouts.add(limited("b", 50.0, arrival_s=0.0))
    timeouts.add(limited("c", None, arrival_s=2.0))
    timeouts.add(limited("d", 1.0, arrival_s=1.5))
    timeouts.discard("d")
    timeouts.discard("unknown")
    assert timeouts.next_s() == 6.0
    assert timeouts.take_late(5.9) == [] and timeouts.take_late(11.0) == ["a", "b"]
    timeouts.add(limited("c", None, arrival_s=7.0))  # another request of that name
    assert timeouts.take_late(13.0) == [] and timeouts.take_late(17.0) == ["c"]
    assert Timeouts().next_s() is None


def test_requests_that_ended_are_swept_out():
    random.seed(1)
    timeouts = Timeouts()
    open_ids = []
    for i in range(5000):
        timeouts.add(limited(f"r{i}", random.uniform(1e3, 1e4)))
        open_ids.append(f"r{i}")
        if len(open_ids) > 20:
            timeouts.discard(open_ids.pop(random.randrange(20)))
    assert len(timeouts._heap) < 200
    assert sorted(timeouts.take_late(1e9)) == sorted(open_ids)
    assert timeouts.next_s() is None


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
def test_running_requests_end_with_what_they_have(steps_in_flight):
    clocked = Clocked(steps_in_flight=steps_in_flight)
    late, other = limited("late", 4.5, max_tokens=30), limited("other", None, max_tokens=12)
    clocked.add(late, other)
    clocked.step(5, seconds=1.0)
    assert clocked.ends == {} and len(clocked.tokens["late"]) == 5
    clocked.step()
    assert clocked.ends == {"late": FinishReason.TIMEOUT}
    assert clocked.tokens["late"] == expected_output(late, 64)[0][:5]
    clocked.drain()
    assert clocked.tokens["other"] == expected_output(other, 64)[0]
    assert clocked.core.scheduler.stats().num_timeouts == 1


def test_waiting_counts():
    clocked = Clocked(max_num_seqs=1)
    clocked.add(limited("first", None), limited("patient", 100.0), limited("hasty", 3.0))
    clocked.step(4, seconds=1.0)
    assert clocked.ends == {"hasty": FinishReason.TIMEOUT} and clocked.tokens["hasty"] == []
    clocked.drain()
    assert clocked.ends["patient"] is FinishReason.LENGTH


def test_late_from_the_start():
    clocked = Clocked()
    clocked.now = 100.0
    clocked.add(limited("a", 1.0, arrival_s=50.0))
    clocked.step()
    assert clocked.ends == {"a": FinishReason.TIMEOUT} and not clocked.core.has_work()


def test_preempted_requests_and_siblings():
    clocked = Clocked(num_blocks=17, block_size=4, max_model_len=64)
    prompt = [1] * 10
    clocked.add(limited("old", None, [2] * 8, 40))
    clocked.add(
        *(limited(f"child{i}", 45.0, prompt, 30, seed=i, leader_id="child0" if i else "") for i in range(3))
    )
    while not clocked.core.scheduler.stats().num_preemptions:
        clocked.step(seconds=1.0)
    assert any(r.status.name == "PREEMPTED" for r in clocked.core.scheduler._tracker.waiting.first(9))
    clocked.now = 45.0
    clocked.step()
    assert clocked.ends == dict.fromkeys(("child0", "child1", "child2"), FinishReason.TIMEOUT)
    clocked.drain()
    assert clocked.ends["old"] is FinishReason.LENGTH


def test_one_limit_for_all():
    clocked = Clocked(max_request_seconds=3.0)
    clocked.add(
        limited("a", None, max_tokens=20), limited("b", 1.5, max_tokens=20), limited("c", 9.0, max_tokens=20)
    )
    clocked.step(3, seconds=1.0)
    assert clocked.ends == {"b": FinishReason.TIMEOUT}
    clocked.step()
    assert set(clocked.ends) == {"a", "b", "c"}


def test_time_runs_on_while_the_engine_is_paused():
    clocked = Clocked()
    clocked.add(limited("inside", 5.0))
    clocked.step()
    clocked.core.call("pause", {"freeze": True})
    clocked.add(limited("outside", 7.0), limited("stays", None))
    clocked.step()
    assert clocked.core.wait_s() == 5.0 and not clocked.core.has_work()
    clocked.now = 6.0
    assert clocked.core.wait_s() == 0.0
    clocked.step()
    clocked.now = 7.0
    clocked.step()
    assert clocked.ends == dict.fromkeys(("inside", "outside"), FinishReason.TIMEOUT)
    assert clocked.core.wait_s() == 3600.0
    clocked.core.call("resume", {})
    clocked.drain()
    assert clocked.ends["stays"] is FinishReason.LENGTH


def test_aborted_and_finished_requests_are_watched_no_longer():
    clocked = Clocked()
    clocked.add(limited("a", 50.0), limited("b", 50.0, max_tokens=1), limited("c", 50.0, [1] * 70))
    clocked.core.abort(["a"])
    clocked.drain()
    assert clocked.ends == {"b": FinishReason.LENGTH, "c": FinishReason.ERROR}
    assert clocked.core.wait_s() == 3600.0
    clocked.now = 60.0
    clocked.step()
    assert set(clocked.ends) == {"b", "c"}


def test_long_waits_are_cut_up():
    clocked = Clocked()
    clocked.core.call("pause", {"freeze": True})
    clocked.add(limited("a", 1e300))
    assert clocked.core.wait_s() == 3600.0
