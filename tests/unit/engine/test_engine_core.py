"""EngineCore over a FakeExecutor: whole runs, refusals, faults, commands."""

import logging

import pytest

from octavo.base.errors import ConfigError, EngineDead, RequestError
from octavo.engine.core import EngineCore
from octavo.messages.request import FinishReason
from octavo.messages.sampling import SamplingParams
from tests.fakes import FakeExecutor, expected_output, fake_config, fake_groups, fake_request


def make(executor=None, **options):
    core = EngineCore(fake_config(**options), executor or FakeExecutor())
    core.start()
    return core


def drain(core):
    """request id → (tokens, last output)"""
    results = {}
    while core.has_work():
        for output in core.step().outputs:
            tokens, _ = results.get(output.request_id, ([], None))
            results[output.request_id] = (tokens + output.new_token_ids, output)
    return results


def requests(count, **fields):
    return [
        fake_request(f"r{i}", [i % 4] * (3 + i % 9), max_tokens=5 + i % 11, seed=i, eos=[3], **fields)
        for i in range(count)
    ]


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
@pytest.mark.parametrize("windows", [(0,), (0, 6), (5,)])
@pytest.mark.parametrize("pressure", [False, True])
def test_outputs_do_not_depend_on_company(steps_in_flight, windows, pressure):
    options = {"num_blocks": 18 * len(windows)} if pressure else {"num_blocks": 400, "max_num_seqs": 32}
    core = make(FakeExecutor(fake_groups(*windows)), steps_in_flight=steps_in_flight, **options)
    asked = requests(30)
    for request in asked:
        core.add(request)
    results = drain(core)
    for request in asked:
        tokens, last = results[request.request_id]
        assert (tokens, last.finish_reason, last.stop_reason) == expected_output(request, 64)
    stats = core.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_blocks_used) == (0, 0, 0)
    assert (stats.num_preemptions > 0) == pressure
    assert stats.num_preemptions == sum(last.num_preemptions for _, last in results.values())


def test_steps_in_flight_are_given_out_ahead():
    executor = FakeExecutor()
    core = make(executor, steps_in_flight=2)
    core.add(fake_request("a", [1, 2], max_tokens=4))
    first = core.step()
    assert len(executor.steps) == 1 and len(core._in_flight) == 1
    assert [len(first.outputs[0].new_token_ids), first.stats.num_steps] == [1, 2]


def test_refused_request_gets_one_error_output():
    core = make()
    core.add(fake_request("long", [1] * 64))
    assert core.has_work()
    [output] = core.step().outputs
    assert (output.request_id, output.finish_reason) == ("long", FinishReason.ERROR)
    assert "at most 63" in output.error
    assert not core.has_work()
    core.add(fake_request("long", [1] * 64))
    core.abort(["long"])
    assert not core.has_work()


def test_duplicate_is_dropped_and_logged(caplog, monkeypatch):
    core = make()
    core.add(fake_request("a", [1, 2], max_tokens=3))
    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)
    with caplog.at_level(logging.WARNING, logger="octavo"):
        core.add(fake_request("a", [9, 9, 9], max_tokens=30))
    assert "'a' is in use" in caplog.text
    assert drain(core)["a"][0] == expected_output(fake_request("a", [1, 2], max_tokens=3), 64)[0]


def test_a_failed_step_is_the_end():
    core = make(FakeExecutor(fail_at_step=2))
    core.add(fake_request("a", [1, 2]))
    core.step()
    core.step()
    with pytest.raises(EngineDead, match="A step failed: RuntimeError: the fake device is gone"):
        core.step()
    core.close()
    core.close()


def test_error_of_one_request_disturbs_nobody():
    core = make(FakeExecutor(errors={"r1": 2}), steps_in_flight=2)
    asked = requests(4)
    for request in asked:
        core.add(request)
    results = drain(core)
    assert results["r1"][1].finish_reason is FinishReason.ERROR and len(results["r1"][0]) == 2
    for request in (asked[0], asked[2], asked[3]):
        assert results[request.request_id][0] == expected_output(request, 64)[0]


def test_logprobs_come_through():
    core = make(max_num_batched_tokens=8)
    core.add(
        fake_request("a", [1] * 10, max_tokens=3, sampling=SamplingParams(logprobs=1, prompt_logprobs=1))
    )
    outputs = []
    while core.has_work():
        outputs += core.step().outputs
    assert [len(output.prompt_logprobs or ()) for output in outputs] == [8, 1, 0, 0]
    assert [len(output.logprobs or ()) for output in outputs] == [0, 1, 1, 1]


def test_commands():
    executor = FakeExecutor()
    core = make(executor)
    core.add(fake_request("a", [1] * 9, max_tokens=2))
    drain(core)
    assert core.call("stats", {})["num_steps"] == 2
    assert core.call("reset_prefix_cache", {}) is True
    assert not core.scheduler.kv.pool._by_key
    assert core.call("collective_rpc", {"verb": "ping", "arguments": {"x": 1}}) == ["ping"]
    assert executor.calls == [("ping", {"x": 1})]
    with pytest.raises(RequestError, match=r"Unknown command 'dance'. Known: collective_rpc"):
        core.call("dance", {})
    with pytest.raises(RequestError, match="collective_rpc needs 'verb'"):
        core.call("collective_rpc", {})


def test_core_must_be_started():
    core = EngineCore(fake_config(), FakeExecutor())
    with pytest.raises(ConfigError, match="not been started"):
        core.add(fake_request("a", [1]))


def test_nothing_is_left_when_idle():
    executor = FakeExecutor(fake_groups(0, 6))
    core = make(executor, num_blocks=60, steps_in_flight=2)
    for request in requests(20):
        core.add(request)
    drain(core)
    tracker = core.scheduler._tracker
    assert (
        not tracker.requests and not tracker.leaving and not len(tracker.waiting) and not len(tracker.running)
    )
    assert set(executor.rows) == set(tracker.released_ids)
    assert core.scheduler.kv.pool.num_free == 59
