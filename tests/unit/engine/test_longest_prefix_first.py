"""The policy lpm: who goes first, how often one may be overtaken, and what it gains over order of arrival."""

import random

import pytest

from octavo.engine.kvcache.prefix import HashChain
from octavo.engine.scheduler.scheduler import MAX_OVERTAKEN, Scheduler
from octavo.messages.kv import CachePlan
from octavo.messages.sampling import SamplingParams
from octavo.messages.step import ModelRunnerOutput
from tests.fakes import fake_config, fake_groups, fake_request

A, B = [1] * 16, [2] * 16


class World:
    """A scheduler whose requests end with their first token, in steps of one seat unless told otherwise."""

    def __init__(self, policy="lpm", num_blocks=200, num_seats=1):
        config = fake_config(scheduling_policy=policy, max_num_seqs=num_seats, max_num_batched_tokens=64)
        self.scheduler = Scheduler(config.scheduler, CachePlan(fake_groups(0), num_blocks, 4), 64)
        self.started = []
        self.cached = {}
        self._now = 0.0

    def add(self, request_id, prompt, **fields):
        self._now += 1.0
        self.scheduler.add(fake_request(request_id, prompt, 1, arrival_s=self._now, **fields))

    def step(self):
        step = self.scheduler.schedule()
        self.started += [new.request_id for new in step.new_requests]
        requests = self.scheduler._tracker.requests
        tokens = [[5] if requests[name].num_pending else [] for name in step.request_ids]
        for output in self.scheduler.update(ModelRunnerOutput(step.step_id, tokens)):
            self.cached[output.request_id] = output.num_cached_tokens

    def run(self):
        while self.scheduler.has_requests:
            self.step()
        return self.started


def test_the_longest_cached_prefix_goes_first_and_ties_go_by_arrival():
    world = World()
    world.add("seed", [*A, *B])
    world.run()
    world.add("nothing", [9] * 20)
    world.add("half", [*A, 7, 7, 7, 7])
    world.add("nothing too", [8] * 20)
    world.add("whole", [*A, *B, 3])
    world.add("half too", [*A, 6, 6, 6, 6])
    assert world.run()[1:] == ["whole", "half", "half too", "nothing", "nothing too"]


def test_what_started_a_step_ago_draws_its_kin():
    """No look at the waiting is the last: the order follows the cache."""
    world = World()
    for name, prompt in {"a0": A, "b0": B, "a1": A, "b1": B, "a2": A}.items():
        world.add(name, [*prompt, int(name[1])])
    assert world.run() == ["a0", "a1", "a2", "b0", "b1"]


def test_order_of_arrival_where_nothing_is_shared():
    world = World()
    for i in range(20):
        world.add(f"r{i}", [i] * 12)
    assert world.run() == [f"r{i}" for i in range(20)]


@pytest.mark.parametrize("num_seats", [1, 4])
def test_nobody_is_overtaken_more_often_than_allowed(num_seats):
    """A stream without end of what is in the cache, and one request that shares nothing."""
    world = World(num_seats=num_seats)
    world.add("a", [*A, 0])
    world.step()
    world.add("lonely", [9] * 20)
    for i in range(6 * MAX_OVERTAKEN):
        world.add(f"a{i}", [*A, i])
        if i > 20 and i % num_seats == 0:
            world.step()
    world.run()
    place = world.started.index("lonely") - 1
    assert MAX_OVERTAKEN <= place < MAX_OVERTAKEN + num_seats


def test_nobody_starves_among_random_arrivals():
    random.seed(4)
    world = World(num_blocks=30, num_seats=3)
    arrived = {}
    for i in range(3000):
        family = random.choice([1, 1, 1, 1, 2, 2, 3, i + 10])
        arrived[f"r{i}"] = i
        world.add(f"r{i}", [family] * random.choice([4, 12, 20]) + [i])
        if i % 3 != 0 or len(world.scheduler._tracker.waiting) > 100:
            world.step()
    world.run()
    assert len(world.cached) == 3000
    delays = [place - arrived[name] for place, name in enumerate(world.started)]
    assert max(delays) <= 2 * (MAX_OVERTAKEN + 3)


def test_families_follow_each_other_and_find_their_prefix():
    """Two prompt families in turns, a cache for one of them: by arrival each drives out the other."""
    hits = {}
    for policy in ("fcfs", "lpm"):
        world = World(policy, num_blocks=6)
        for i in range(20):
            world.add(f"a{i}", [*A, 100 + i])
            world.add(f"b{i}", [*B, 100 + i])
        world.run()
        hits[policy] = sum(world.cached.values()) / (40 * 17)
    assert hits["fcfs"] == 0.0
    assert hits["lpm"] > 0.85


def test_counting_from_the_last_answer_equals_counting_anew():
    """Blocks come and go; salts and lengths differ; the cache counts the same from anywhere."""
    random.seed(1)
    world = World(num_blocks=24, num_seats=2)
    kv = world.scheduler.kv
    watched = [[random.randint(1, 2)] * 8 + [random.randint(1, 2)] * 8 for _ in range(10)]
    chains = [HashChain(4) for _ in watched]
    last = [0] * len(watched)
    for i in range(150):
        prompt = random.choice(watched)[: random.choice([4, 8, 12, 16])]
        world.add(f"r{i}", [*prompt, 50 + i % 5])
        world.step()
        for j, (chain, tokens) in enumerate(zip(chains, watched, strict=True)):
            last[j] = kv.count_cached(chain, tokens, last[j])
            assert last[j] == kv.match(HashChain(4), [*tokens, 0]).num_tokens // 4
    assert kv.count_cached(HashChain(4, salt="x"), watched[0], 0) == 0


def test_requests_that_may_not_read_the_cache_run_too():
    world = World()
    world.add("a", [*A, 1])
    world.run()
    world.add("b", [*A, 1], sampling=SamplingParams(max_tokens=1, skip_reading_prefix_cache=True))
    world.run()
    assert world.cached == {"a": 0, "b": 0}
