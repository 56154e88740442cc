"""The balancer over simulated replicas: one that is slow, and prompts that begin alike.

A replica computes steps as the engine does: a token for each running request, prompts in chunks under a
budget; a step takes as long as its tokens say, or a multiple of that.
"""

import heapq
import random
from dataclasses import dataclass, field, replace

import pytest

from octavo.frontend.client.balancer import Balancer
from octavo.frontend.client.placement import BLOCK
from octavo.messages.request import EngineOutput, FinishReason, SchedulerStats
from tests.fakes import fake_request

BUDGET, MOST_RUNNING = 1024, 32
BASE_S, PER_TOKEN_S = 0.010, 0.00004


@dataclass(eq=False)
class Job:
    name: str
    tokens: list
    num_output: int
    arrived_s: float
    num_left: int = 0
    num_done: int = 0


@dataclass
class Replica:
    slowness: float = 1.0
    waiting: list = field(default_factory=list)
    running: list = field(default_factory=list)
    num_steps: int = 0
    known: set = field(default_factory=set)
    num_hits: int = 0

    def enter(self, job):
        """Take a job; what it shares with earlier ones need not be computed."""
        keys = [tuple(job.tokens[: end + BLOCK]) for end in range(0, len(job.tokens) - BLOCK, BLOCK)]
        hits = next((i for i, key in enumerate(keys) if key not in self.known), len(keys)) * BLOCK
        self.num_hits += hits
        self.known.update(keys)
        job.num_left = len(job.tokens) - hits
        self.waiting.append(job)

    def step(self):
        """Plan a step: (its seconds, those with a token, those that end)."""
        self.num_steps += 1
        budget, news = BUDGET - len(self.running), list(self.running)
        while self.waiting and budget > 0 and len(self.running) < MOST_RUNNING:
            job = self.waiting[0]
            chunk = min(budget, job.num_left)
            budget, job.num_left = budget - chunk, job.num_left - chunk
            if job.num_left:
                break
            self.running.append(self.waiting.pop(0))
            news.append(job)
        for job in news:
            job.num_done += 1
        ended = [job for job in news if job.num_done >= job.num_output]
        self.running = [job for job in self.running if job not in ended]
        return (BASE_S + (BUDGET - budget) * PER_TOKEN_S) * self.slowness, news, ended


def run(jobs, replicas, place, note=lambda *_: None):
    """Return the latency of every job."""
    events = [(job.arrived_s, number, job) for number, job in enumerate(jobs)]
    heapq.heapify(events)
    latencies, busy, count = {}, [False] * len(replicas), len(jobs)
    while events:
        now, _, event = heapq.heappop(events)
        if isinstance(event, Job):
            index = place(event, now)
            replicas[index].enter(event)
        else:
            index, news, ended = event
            note(index, news, ended, now)
            busy[index] = False
            latencies |= {job.name: now - job.arrived_s for job in ended}
        replica = replicas[index]
        if not busy[index] and (replica.waiting or replica.running):
            busy[index] = True
            took, news, ended = replica.step()
            count += 1
            heapq.heappush(events, (now + took, count, (index, news, ended)))
    assert len(latencies) == len(jobs)
    return latencies


def balanced(jobs, replicas, is_told=True):
    """Run with the balancer; is_told: it hears when steps end."""
    balancer = Balancer(len(replicas))

    def place(job, now):
        return balancer.place(fake_request(job.name, job.tokens, job.num_output))

    def note(index, news, ended, now):
        outputs = [
            EngineOutput(job.name, [1], finish_reason=FinishReason.STOP if job in ended else None)
            for job in news
        ]
        steps = replicas[index].num_steps
        balancer.note(index, outputs, SchedulerStats(num_steps=steps, num_blocks=1), now if is_told else 0.0)

    return run(jobs, replicas, place, note)


def oracle(jobs, replicas):
    """Run with what nobody can know: each job goes where it would end first, if no other came."""

    def place(job, _):
        def end(index):
            now = replicas[index]
            replica = Replica(now.slowness, fresh(now.waiting), fresh(now.running))
            own = replace(job)
            replica.enter(own)
            total = 0.0
            while own.num_done < own.num_output:
                total += replica.step()[0]
            return total

        return min(range(len(replicas)), key=end)

    return run(jobs, replicas, place)


def fresh(jobs):
    return [replace(job) for job in jobs]


def p99(latencies):
    return sorted(latencies.values())[int(len(latencies) * 0.99)]


def load(count, rate, seed=1):
    chance, now, jobs = random.Random(seed), 0.0, []
    for number in range(count):
        now += chance.expovariate(rate)
        tokens = [chance.randrange(1000) for _ in range(chance.choice((20, 100, 400)))]
        jobs.append(Job(str(number), tokens, 40, now))
    return jobs


@pytest.mark.parametrize("seed", [1, 2])
def test_a_replica_that_is_three_times_as_slow_gets_less(seed):
    """Under a load that needs both."""
    jobs = load(1000, 50, seed)
    best = p99(oracle(fresh(jobs), [Replica(3.0), Replica()]))
    found, blind = (
        p99(balanced(fresh(jobs), [Replica(3.0), Replica()], is_told=is_told)) for is_told in (True, False)
    )
    assert found <= 1.3 * best
    assert blind > 1.3 * best, "without the times of its steps a slow replica is not seen"


def test_a_replica_that_recovers_is_found_out():
    replicas, jobs = [Replica(3.0), Replica()], load(1500, 30)
    balanced(jobs[:500], replicas)
    replicas[0].slowness, before = 1.0, [replica.num_steps for replica in replicas]
    balanced(jobs[500:], replicas)
    first, second = (replica.num_steps - then for replica, then in zip(replicas, before, strict=True))
    assert 0.7 < first / second < 1.4


def test_prompts_that_begin_alike_find_their_beginnings():
    chance, jobs, now = random.Random(2), [], 0.0
    systems = [[chance.randrange(1000) for _ in range(640)] for _ in range(30)]
    for number in range(1200):
        now += chance.expovariate(25)
        tail = [chance.randrange(1000) for _ in range(60)]
        jobs.append(Job(str(number), chance.choice(systems) + tail, 30, now))
    alone, several = [Replica()], [Replica() for _ in range(2)]
    balanced(fresh(jobs), alone)
    balanced(fresh(jobs), several)
    assert sum(replica.num_hits for replica in several) >= 0.9 * alone[0].num_hits
    steps = [replica.num_steps for replica in several]
    assert max(steps) < 1.3 * min(steps), "and both have work"
