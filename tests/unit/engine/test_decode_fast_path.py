"""A decoding request to which nothing happens takes fast paths, which give what the slow ones give."""

import random

import msgspec
import pytest

from octavo.engine.core import EngineCore
from octavo.engine.scheduler.request import Request
from octavo.messages.sampling import RepetitionDetectionParams, SamplingParams
from tests.fakes import FakeExecutor, fake_config, fake_groups, fake_request

WAYS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, stop_token_ids=list(range(60)), min_tokens=3),
    SamplingParams(temperature=0.0, logprobs=1),
    SamplingParams(
        temperature=0.0,
        repetition_detection=RepetitionDetectionParams(max_pattern_size=2, min_pattern_size=1, min_count=2),
    ),
]


def run(seed, policy, steps_in_flight, caching, windows, *, shortly):
    """Everything that the workers and the front are told; and how many tokens were given in the short way."""
    draw = random.Random(seed)
    config = fake_config(
        num_blocks=24,
        max_num_seqs=6,
        steps_in_flight=steps_in_flight,
        enable_prefix_caching=caching,
        scheduling_policy=policy,
    )
    executor = FakeExecutor(fake_groups(*windows))
    core = EngineCore(config, executor, clock=lambda: 0.0)
    core.start()
    told, count = [], 0
    for number in range(80):
        if number < 60 and draw.random() < 0.5:
            prompt = [draw.randrange(3) for _ in range(draw.randrange(1, 14))]
            max_tokens, params = draw.randrange(1, 20), draw.choice(WAYS)
            core.add(fake_request(f"r{number}", prompt, max_tokens, sampling=params, arrival_s=float(number)))
        if draw.random() < 0.1:
            core.abort([f"r{draw.randrange(number + 1)}"])
        if draw.random() < 0.02:
            core.scheduler.kv.reset_prefix_cache()
        outputs = core.step().outputs
        for output in outputs:
            output.scheduled_s = 0.0
        told.append(msgspec.json.encode(outputs))
        running = core.scheduler._tracker.running.in_order()
        count += sum(request.num_computed < request.routine_until for request in running)
        if not shortly:
            for request in running:
                request.routine_until = 0
    told += [msgspec.json.encode(step) for step in executor.steps]
    return told, count


@pytest.mark.parametrize(
    ("policy", "steps_in_flight", "caching", "windows"),
    [("fcfs", 1, True, (0,)), ("fcfs", 2, True, (0, 6)), ("lpm", 2, False, (0,)), ("fair", 1, True, (0,))],
)
def test_fast_and_slow_paths_give_the_same(monkeypatch, policy, steps_in_flight, caching, windows):
    for seed in range(3):
        case = (seed, policy, steps_in_flight, caching, windows)
        told, count = run(*case, shortly=True)
        with monkeypatch.context() as patch:
            patch.setattr(Request, "is_routine", lambda request, token_id: False)
            assert told == run(*case, shortly=False)[0]
        assert (count > 50) == (policy != "fair"), "in turns, every token is charged"
