"""Requests held after their end: followers share their blocks, and nobody waits for them."""

from collections import defaultdict

import pytest

from octavo.engine.core import EngineCore
from octavo.messages.request import FinishReason
from octavo.messages.sampling import SamplingParams
from tests.fakes import FakeExecutor, fake_config, fake_groups, fake_request

BLOCK_SIZE = 4
PROMPT = list(range(1, 20))  # four full blocks and three tokens of a fifth


class Engine:
    """A core over a FakeExecutor, driven to idle."""

    def __init__(self, *windows, **options):
        self.executor = FakeExecutor(fake_groups(*(windows or (0,))))
        self.core = EngineCore(fake_config(block_size=BLOCK_SIZE, **options), self.executor)
        self.core.start()
        self.pool = self.core.scheduler.kv.pool

    def run(self, *requests):
        """The requests' tokens and ends, by their ids."""
        for request in requests:
            self.core.add(request)
        tokens, reasons = defaultdict(list), {}
        while self.core.has_work():
            for output in self.core.step().outputs:
                tokens[output.request_id] += output.new_token_ids
                reasons[output.request_id] = output.finish_reason
        return {request_id: (tokens[request_id], reason) for request_id, reason in reasons.items()}

    def num_computed(self):
        """Tokens computed since the last call."""
        steps, self.executor.steps = self.executor.steps, []
        return sum(step.num_tokens for step in steps), sum(len(step.block_copies) for step in steps)


def one(request_id, prompt, leader_id="", hold=True, **fields):
    return fake_request(request_id, prompt, 1, leader_id=leader_id, hold=hold, **fields)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("windows", [(0,), (0, 6), (4,)])
def test_a_follower_computes_one_token(windows, caching):
    engine = Engine(*windows, enable_prefix_caching=caching)
    engine.run(one("leader", PROMPT))
    assert engine.num_computed() == (len(PROMPT), 0)
    assert not engine.core.has_work()
    engine.run(one("a", [*PROMPT, 50], "leader"), one("b", [*PROMPT, 51], "leader"))
    assert engine.num_computed() == (2, 2 * len(windows))
    engine.core.abort(["leader"])
    engine.run(one("c", [*PROMPT, 50, 60], "a"))
    assert engine.num_computed()[0] == 1
    engine.core.abort(["a", "b", "c", "unknown"])
    assert engine.pool.num_used == 0


def test_full_blocks_are_never_copied():
    engine = Engine()
    tokens, copies, leader = PROMPT[:], 0, ""
    for number in range(10):
        engine.run(one(f"r{number}", tokens, leader))
        computed, copied = engine.num_computed()
        assert computed == (1 if leader else len(PROMPT))
        assert copied == (1 if leader and (len(tokens) - 1) % BLOCK_SIZE else 0)
        if leader:
            engine.core.abort([leader])
        assert engine.pool.num_used == -(-len(tokens) // BLOCK_SIZE)
        copies, leader = copies + copied, f"r{number}"
        tokens = [*tokens, 100 + number]


def test_many_followers_own_a_block_each():
    engine = Engine(max_num_seqs=8)
    engine.run(one("leader", PROMPT))
    engine.run(*(one(f"r{n}", [*PROMPT, n], "leader") for n in range(8)))
    assert engine.pool.num_used == 5 + 8


def test_a_follower_may_go_back_and_may_not_go_astray():
    engine = Engine(enable_prefix_caching=False)
    [(output, _)] = engine.run(fake_request("leader", PROMPT, 6, hold=True)).values()
    known = PROMPT + output
    engine.num_computed()
    engine.run(one("back", [*PROMPT[:10], 99], "leader", hold=False))
    assert engine.num_computed()[0] == 1
    engine.run(one("all", [*known, 99], "leader", hold=False))
    assert engine.num_computed()[0] == 2, "the leader's last token was never computed"
    engine.run(one("astray", [*PROMPT[:10], 98, 99], "leader", hold=False))
    assert engine.num_computed()[0] == 12
    engine.run(one("salted", [*PROMPT, 99], "leader", hold=False, cache_salt="s"))
    assert engine.num_computed()[0] == 20


def test_what_a_leader_shares_with_its_own_step_is_not_copied_yet():
    """`first` fills blocks, `leader` starts from them in the same step, a follower would copy the last."""
    engine = Engine()
    first = one("first", PROMPT, hold=False)
    leader = one("leader", [*PROMPT[:16], 50, 51], hold=False)
    follower = one("follower", [*PROMPT[:15], 60], "leader", hold=False)
    outputs = engine.run(first, leader, follower)
    assert {reason for _, reason in outputs.values()} == {FinishReason.LENGTH}


def test_held_blocks_give_way_oldest_first():
    engine = Engine(num_blocks=1 + 12, max_model_len=48, enable_prefix_caching=False)
    for number in range(2):
        engine.run(one(f"r{number}", [number + 1] * 20))
    assert engine.pool.num_used == 10
    assert engine.run(one("big", [9] * 24, hold=False))["big"][1] is FinishReason.LENGTH
    assert list(engine.core.scheduler._tracker.retained) == ["r1"]
    engine.num_computed()
    engine.run(one("late", [*[1] * 20, 5], "r0", hold=False))
    assert engine.num_computed()[0] == 21


def test_a_running_request_takes_held_blocks_before_others_are_preempted():
    engine = Engine(num_blocks=1 + 12, max_model_len=48)
    engine.run(one("held", [1] * 20))
    outputs = engine.run(fake_request("a", [2] * 8, 16), fake_request("b", [3] * 8, 14))
    assert (len(outputs["a"][0]), len(outputs["b"][0])) == (16, 14)
    assert engine.core.scheduler.stats().num_preemptions == 0
    assert engine.pool.num_used == 0


def test_a_follower_whose_leader_is_dropped_still_runs():
    """The only block it could start with is its leader's."""
    engine = Engine(num_blocks=1 + 5, max_model_len=20)
    engine.run(one("leader", [1] * 18))
    outputs = engine.run(one("follower", [*[1] * 18, 2], "leader", hold=False))
    assert outputs["follower"][1] is FinishReason.LENGTH
    assert engine.pool.num_used == 0


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_only_a_regular_end_is_held(reason):
    engine = Engine()
    if reason == "error":
        engine.executor.errors["r"] = 0
    engine.core.add(one("r", PROMPT))
    if reason == "abort":
        engine.core.abort(["r"])
    engine.run()
    assert engine.pool.num_used == 0
    assert not len(engine.core.scheduler._tracker.retained)


def test_letting_go_while_a_step_is_in_flight():
    engine = Engine(steps_in_flight=2)
    stops = SamplingParams(max_tokens=9, stop_token_ids=list(range(256)))
    engine.core.add(fake_request("r", PROMPT, 9, sampling=stops, hold=True))
    assert engine.core.step().outputs[0].finish_reason is FinishReason.STOP
    engine.core.abort(["r"])
    engine.run()
    assert engine.pool.num_used == 0


def test_an_id_is_in_use_while_it_is_held():
    engine = Engine()
    engine.run(one("r", PROMPT))
    engine.core.add(one("r", [7, 7, 7]))
    assert engine.run() == {}
    assert len(engine.core.scheduler._tracker.retained) == 1
