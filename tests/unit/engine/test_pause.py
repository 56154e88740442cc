"""Pause, resume, sleep and wake over a FakeExecutor, which notices any block that was not recomputed."""

import pytest

from octavo.base.errors import RequestError, Unsupported
from octavo.engine.core import EngineCore
from octavo.messages.request import FinishReason
from tests.fakes import FakeExecutor, expected_output, fake_config, fake_request


class SleepyExecutor(FakeExecutor):
    """Forgets its memory when told to sleep, as a real worker does."""

    def call(self, verb, arguments):
        if verb == "sleep" and "kv_cache" in arguments["parts"]:
            self.memory = None
        if verb == "wake_up" and "kv_cache" in arguments["parts"]:
            self.allocate(self.plan)
        return super().call(verb, arguments)


@pytest.fixture(params=[1, 2, 3])
def core(request):
    core = EngineCore(fake_config(num_blocks=200, steps_in_flight=request.param), SleepyExecutor())
    core.start()
    return core


def ask(core, *names, **fields):
    requests = [
        fake_request(name, list(name.encode()) * 5, 12, seed=ord(name[0]), **fields) for name in names
    ]
    for request in requests:
        core.add(request)
    return requests


def run(core, results, steps=10**6):
    while core.has_work() and steps:
        steps -= 1
        for output in core.step().outputs:
            tokens, _ = results.get(output.request_id, ([], None))
            results[output.request_id] = (tokens + output.new_token_ids, output.finish_reason)
    return results


def check(requests, results):
    for request in requests:
        tokens, reason, _ = expected_output(request, 64)
        assert results[request.request_id] == (tokens, reason), request.request_id


def test_a_frozen_engine_goes_on_where_it_stood(core):
    requests = ask(core, "a", "b", "c")
    results = run(core, {}, steps=4)
    core.call("pause", {"freeze": True})
    run(core, results)
    before = {name: len(tokens) for name, (tokens, _) in results.items()}
    assert not core.has_work()
    requests += ask(core, "d")
    assert not core.has_work()
    assert core.call("is_paused", {}) is True
    assert {name: len(tokens) for name, (tokens, _) in run(core, results).items()} == before
    core.call("resume", {})
    check(requests, run(core, results))
    assert core.call("is_paused", {}) is False


def test_a_closed_engine_finishes_what_it_has(core):
    inside = ask(core, "a", "b")
    results = run(core, {}, steps=1)
    core.call("pause", {})
    outside = ask(core, "c", "d")
    check(inside, run(core, results))
    assert set(results) == {"a", "b"}
    core.abort(["c", "unknown"])
    core.call("resume", {})
    check(outside[1:], run(core, results))
    assert set(results) == {"a", "b", "d"}


def test_who_goes_on_from_an_open_request_is_part_of_it(core):
    core.add(fake_request("leader", [1] * 9, 8))
    core.call("pause", {})
    core.add(fake_request("follower", [1] * 9, 8, leader_id="leader"))
    core.add(fake_request("new", [2] * 9, 8))
    core.add(fake_request("new-1", [2] * 9, 8, leader_id="new"))
    assert set(run(core, {})) == {"leader", "follower"}
    core.call("resume", {})
    assert set(run(core, {})) == {"new", "new-1"}


@pytest.mark.parametrize("parts", [["kv_cache"], ["kv_cache", "weights"]])
def test_sleep_changes_no_token(core, parts):
    requests = ask(core, "a", "b", "c")
    results = run(core, {}, steps=5)
    core.call("sleep", {"parts": parts})
    run(core, results)
    requests += ask(core, "d")
    assert core.call("is_sleeping", {}) == parts
    assert not core.has_work()
    with pytest.raises(RequestError, match="asleep"):
        core.call("resume", {})
    assert core.call("wake_up", {"parts": parts[:1]}) == parts[1:]
    assert core.call("wake_up", {"parts": []}) == []
    check(requests, run(core, results))
    assert core.scheduler.stats().num_blocks_used == 0


def test_workers_hear_each_part_once(core):
    core.call("sleep", {"parts": ["kv_cache"]})
    core.call("sleep", {"parts": ["kv_cache", "weights"], "discard_weights": True})
    core.call("wake_up", {"parts": []})
    core.call("wake_up", {"parts": []})
    assert core._executor.calls == [
        ("sleep", {"parts": ["kv_cache"], "discard_weights": False}),
        ("sleep", {"parts": ["weights"], "discard_weights": True}),
        ("wake_up", {"parts": ["kv_cache", "weights"]}),
    ]


def test_workers_hear_nothing_of_a_sleep_that_frees_nothing(core):
    core.call("sleep", {"parts": []})
    assert core.call("is_paused", {}) is True
    assert core.call("wake_up", {"parts": []}) == []
    assert core._executor.calls == []


def test_resetting_running_requests_changes_no_token(core):
    requests = ask(core, "a", "b", "c")
    results = run(core, {}, steps=5)
    assert core.call("reset_prefix_cache", {"reset_running_requests": True}) is True
    check(requests, run(core, results))
    assert core.scheduler.stats().num_preemptions >= 1


def test_aborted_while_frozen(core):
    ask(core, "a", "b")
    results = run(core, {}, steps=3)
    core.call("pause", {"freeze": True})
    core.abort(["a"])
    core.call("resume", {})
    run(core, results)
    assert results["b"][1] is FinishReason.LENGTH
    assert core.scheduler.stats().num_blocks_used == 0


def test_functions_need_workers_of_this_process(core):
    with pytest.raises(Unsupported, match="distributed_executor_backend='inproc'"):
        core.call("collective_rpc", {"function": len})
