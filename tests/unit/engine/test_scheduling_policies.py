"""Scheduling policies at work, on a clock that runs as tokens are computed: who is served, when, how much."""

import random
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import pytest

from octavo.engine.scheduler.policies.fair import FairShares
from octavo.engine.scheduler.scheduler import Scheduler
from octavo.messages.kv import CachePlan
from octavo.messages.sampling import SamplingParams
from octavo.messages.step import ModelRunnerOutput
from tests.fakes import fake_config, fake_groups, fake_request


class World:
    """One scheduler, arrivals in order of time, and a device whose steps take 1 s and 0.01 s per token."""

    def __init__(self, policy, *, num_blocks=2000, **options):
        options = {"max_num_seqs": 8, "max_num_batched_tokens": 64} | options
        config = fake_config(scheduling_policy=policy, **options).scheduler
        self.scheduler = Scheduler(config, CachePlan(fake_groups(0), num_blocks, 4), 200)
        self.tracker = self.scheduler._tracker
        self.now = 0.0
        self.started = {}
        """Request id → when it first ran, in order of start."""
        self.ended = {}
        self.num_computed = Counter()
        """Tokens by request id."""

    def add(self, request_id, num_prompt=8, max_tokens=4, token=None, **fields):
        fields.setdefault("arrival_s", self.now)
        token = len(self.started) + len(self.tracker.requests) if token is None else token
        self.scheduler.add(fake_request(request_id, [token] * num_prompt, max_tokens, **fields))

    def step(self):
        """One step, if there is anything to do; its tokens by request id."""
        step = self.scheduler.schedule()
        if step is None:
            self.now += 1.0
            return {}
        for new in step.new_requests:
            self.started.setdefault(new.request_id, self.now)
        requests = [self.tracker.requests[request_id] for request_id in step.request_ids]
        tokens = [[5] if request.num_pending else [] for request in requests]
        self.now += 1.0 + 0.01 * step.num_tokens
        parts = dict(zip(step.request_ids, step.num_scheduled_tokens, strict=True))
        self.num_computed.update(parts)
        for output in self.scheduler.update(ModelRunnerOutput(step.step_id, tokens)):
            if output.finish_reason is not None:
                self.ended[output.request_id] = self.now
        return parts

    def play(self, arrivals):
        """All of it: arrivals are (time, request id, fields), by time."""
        for arrival_s, request_id, fields in arrivals:
            while self.now < arrival_s:
                self.step()
            self.add(request_id, arrival_s=arrival_s, **fields)
        while self.scheduler.has_requests:
            self.step()

    def shares(self, tenant_of):
        """Tokens computed for each tenant."""
        shares = Counter()
        for request_id, count in self.num_computed.items():
            shares[tenant_of(request_id)] += count
        return shares


POLICIES = {
    "fcfs": {},
    "priority": {},
    "priority, aging": {"priority_aging_s": 20.0},
    "deadline": {},
    "fair": {"fair_weights": {"a": 3.0}},
}


@pytest.mark.matrix
@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_starves_among_ten_thousand_random_arrivals(policy):
    """Nearly all that the engine can do, blocks being short: all are served, none waits 50 times the mean."""
    random.seed(7)
    world = World(policy.split(",")[0], num_blocks=40, **POLICIES[policy])
    at = 0.0
    arrivals = []
    for i in range(10_000):
        at += random.expovariate(1.15)
        fields = {
            "num_prompt": random.choice([1, 4, 9, 40]),
            "max_tokens": random.randint(1, 8),
            "priority": random.randint(0, 3),
            "tenant": random.choice("abc"),
            "due_s": random.choice([None, at + 10.0, at + 100.0]),
        }
        arrivals.append((at, f"r{i}", fields))
    world.play(arrivals)
    waits = [world.started[request_id] - arrival_s for arrival_s, request_id, _ in arrivals]
    assert len(world.ended) == 10_000
    assert 3.0 < sum(waits) / len(waits) < 5.0, "the load is not what the test is about"
    assert max(waits) < 50 * sum(waits) / len(waits)
    assert world.scheduler.stats().num_preemptions > 100
    assert world.scheduler.kv.pool.num_used == 0


def test_earliest_deadline_first_meets_deadlines_that_order_of_arrival_misses():
    """A batch without hurry comes just before requests that are: both can be met, one behind the other."""
    arrivals = [(0.0, f"batch{i}", {"due_s": 2000.0}) for i in range(60)]
    arrivals += [(1.0 + i, f"soon{i}", {"due_s": 20.0 + i}) for i in range(40)]
    arrivals += [(41.0, f"never{i}", {}) for i in range(5)]
    met = {}
    for policy in ("fcfs", "deadline"):
        world = World(policy)
        world.play(arrivals)
        due = [(request_id, fields["due_s"]) for _, request_id, fields in arrivals if "due_s" in fields]
        met[policy] = sum(world.ended[request_id] <= due_s for request_id, due_s in due) / len(due)
    assert met["deadline"] == 1.0
    assert met["fcfs"] < 0.8
    assert list(world.started)[-5:] == [f"never{i}" for i in range(5)]


def test_a_deadline_is_given_or_follows_from_the_timeout():
    world = World("deadline", max_num_seqs=1)
    world.add("never")
    world.add("timeout", sampling=SamplingParams(max_tokens=1, timeout_s=50))
    world.add("due", due_s=40.0)
    world.add("due sooner than its timeout", due_s=30.0, sampling=SamplingParams(max_tokens=1, timeout_s=90))
    while world.scheduler.has_requests:
        world.step()
    assert list(world.started) == ["due sooner than its timeout", "due", "timeout", "never"]


@pytest.mark.parametrize("aging_s", [5.0, 50.0])
def test_aging_lets_the_unimportant_pass_those_that_come_much_later(aging_s):
    """An endless stream of urgent requests, twice what can be served."""
    random.seed(3)
    world = World("priority", max_num_seqs=2, priority_aging_s=aging_s)
    facts = {}
    arrivals = []
    for i in range(300):
        at, priority = i * 1.0, random.choice([0, 0, 0, 0, 3])
        facts[f"r{i}"] = (at, priority)
        arrivals.append((at, f"r{i}", {"priority": priority, "max_tokens": 4}))
    world.play(arrivals)
    order = list(world.started)
    for place, request_id in enumerate(order):
        at, priority = facts[request_id]
        for earlier in order[:place]:
            other_at, other_priority = facts[earlier]
            assert other_at - at <= max(0, priority - other_priority) * aging_s
    assert any(facts[a][1] > facts[b][1] for a, b in pairwise(order))


def backlog(world, tenants, count=400):
    """`count` requests of each tenant, of its own kind, all there from the start."""
    for i in range(count):
        for tenant, kind in tenants.items():
            world.add(f"{tenant}{i}", token=1000 * ord(tenant) + i, tenant=tenant, **kind)


@pytest.mark.parametrize("weights", [{}, {"a": 1, "b": 2, "c": 5}, {"b": 0.25}])
def test_shares_are_as_the_weights(weights):
    """Long prompts, long answers, and both: in computed tokens all get what their weight says."""
    world = World("fair", fair_weights=weights)
    kinds = {"a": {"num_prompt": 30, "max_tokens": 2}, "b": {"max_tokens": 20}, "c": {"num_prompt": 20}}
    backlog(world, kinds)
    while sum(world.num_computed.values()) < 8000:
        world.step()
        assert len(world.tracker.waiting) > 0
    assert {request.standing.tenant for request in world.tracker.waiting.first(9999)} == {"a", "b", "c"}
    shares = world.shares(lambda request_id: request_id[0])
    whole = sum(weights.get(tenant, 1) for tenant in kinds)
    for tenant in kinds:
        assert shares[tenant] / shares.total() == pytest.approx(weights.get(tenant, 1) / whole, rel=0.05)


def test_a_burst_of_seats_is_shared_out_too():
    world = World("fair", max_num_seqs=6)
    backlog(world, {"a": {}, "b": {}}, count=20)
    world.step()
    assert Counter(request_id[0] for request_id in world.started) == {"a": 3, "b": 3}


def test_idleness_earns_no_credit():
    world = World("fair")
    backlog(world, {"a": {}}, count=300)
    while sum(world.num_computed.values()) < 2000:
        world.step()
    world.num_computed.clear()
    backlog(world, {"b": {}}, count=300)
    while sum(world.num_computed.values()) < 2000:
        world.step()
    shares = world.shares(lambda request_id: request_id[0])
    assert shares["b"] / shares.total() == pytest.approx(0.5, rel=0.05)


def test_tokens_found_in_the_cache_are_not_charged():
    world = World("fair", max_num_seqs=2)
    for i in range(200):
        world.add(f"a{i}", num_prompt=33, max_tokens=2, token=1, tenant="a")
        world.add(f"b{i}", num_prompt=33, max_tokens=2, token=i + 2, tenant="b")
    for _ in range(150):
        world.step()
    shares = world.shares(lambda request_id: request_id[0])
    assert shares["a"] / shares.total() == pytest.approx(0.5, rel=0.1)
    ended = Counter(request_id[0] for request_id in world.ended)
    assert ended["a"] > 4 * ended["b"]


def entry(tenant):
    return SimpleNamespace(standing=SimpleNamespace(tenant=tenant))


def test_spending_is_remembered_while_it_matters_and_no_longer():
    policy = FairShares({"b": 2.0})
    policy.enter(entry("a"))
    policy.charge(entry("a"), 10)
    policy.enter(entry("b"))
    assert (policy.turn("a"), policy.turn("b")) == (10.0, 10.0)
    policy.charge(entry("b"), 30)
    policy.leave(entry("b"))
    policy.enter(entry("b"))
    assert policy.turn("b") == 25.0, "leaving and coming back is no way out"
    policy.leave(entry("b"))
    policy.charge(entry("a"), 90)
    policy.enter(entry("c"))
    assert policy.turn("c") == 100.0 and set(policy._spent) == {"a", "c"}, "b has been caught up with"
    for tenant in "ac":
        policy.leave(entry(tenant))
    policy.enter(entry("d"))
    assert policy._spent == {"d": 0.0}


@pytest.mark.parametrize(
    ("policy", "oldest", "victim", "spared"),
    [
        ("fcfs", {}, {}, None),
        ("priority", {"priority": 9}, {"priority": 5}, {"priority": 1}),
        ("deadline", {}, {"due_s": 90.0}, {"due_s": 10.0}),
        ("fair", {"tenant": "a"}, {"tenant": "a"}, {"tenant": "b"}),
    ],
)
def test_victims_follow_the_policy_but_the_oldest_is_spared(policy, oldest, victim, spared):
    """Three requests in six blocks: the third block of one of them has to come from another."""
    world = World(policy, num_blocks=7)
    world.add("oldest", 7, 12, arrival_s=0.0, **oldest)
    world.add("victim" if spared else "spared", 7, 12, arrival_s=1.0, **(victim if spared else {}))
    world.add("spared" if spared else "victim", 7, 12, arrival_s=2.0, **(spared or victim))
    while not world.scheduler.stats().num_preemptions:
        world.step()
    assert [request.request_id for request in world.tracker.waiting.first(9)] == ["victim"]
    while world.scheduler.has_requests:
        world.step()
    assert set(world.ended) == {"oldest", "victim", "spared"}


def test_gaps_between_tokens_stay_bounded_while_long_prompts_are_computed():
    world = World("fcfs", long_prefill_token_threshold=16, max_num_batched_tokens=64, max_num_seqs=8)
    for i in range(4):
        world.add(f"chat{i}", 4, 60)
    world.step()
    world.add("long", 190, 2)
    sizes = []
    while "long" not in world.ended:
        parts = world.step()
        assert all(parts[f"chat{i}"] == 1 for i in range(4)), "every answer goes on in every step"
        sizes.append(sum(parts.values()))
    assert max(sizes) == 16 + 4 and len(sizes) >= 190 // 16
    for i in range(3):
        world.add(f"long{i}", 190, 2)
    while not all(f"long{i}" in world.ended for i in range(3)):
        parts = world.step()
        assert all(parts[name] == 1 for name in parts if name.startswith("chat"))
        assert max(parts.values()) <= 16 and sum(parts.values()) <= 64
