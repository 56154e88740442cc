"""Long prompts beside streams: steps are bounded in time, and nothing is cut where nobody watches."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.core import EngineCore
from octavo.engine.scheduler.prompt_pace import FIRST_TOKENS, LEAST_TOKENS, STEP_S, PromptPace
from octavo.messages.sampling import RequestOutputKind, SamplingParams
from tests.fakes import FakeExecutor, expected_output, fake_config, fake_groups, fake_request

PLAIN_S, TOKEN_S = 0.010, 0.002
LONG = [5] * 1000


@given(
    plain_s=st.floats(0.0005, 0.3),
    token_s=st.floats(1e-6, 0.003),
    growth=st.floats(0, 0.5),
    first_s=st.floats(0, 3),
    num_before=st.integers(1, 4096),
)
def test_steps_become_as_long_as_they_may_be(plain_s, token_s, growth, first_s, num_before):
    """Whatever a step costs: tokens far from the beginning may cost more, the first may be slow.

    growth: by how much more 100,000 tokens behind; what is learnt lags behind where it is several times that
    """
    pace, longest = PromptPace(), max(STEP_S, 2 * plain_s)
    assert pace.num_tokens() == FIRST_TOKENS
    for _ in range(40):
        pace.note(0, plain_s)
    pace.note(num_before, plain_s + num_before * token_s + first_s)
    done = 0
    for step in range(60):
        num_tokens = pace.num_tokens()
        took_s = plain_s + num_tokens * token_s * (1 + growth * done / 100_000)
        pace.note(num_tokens, took_s)
        done += min(num_tokens, 1000)
        if step >= 45:
            assert took_s <= 1.2 * longest or num_tokens == LEAST_TOKENS
            assert took_s >= 0.9 * longest or num_tokens * token_s >= 0.4 * longest


class Device(FakeExecutor):
    """Takes PLAIN_S for a step, and TOKEN_S for each token beyond one of each request."""

    def __init__(self):
        super().__init__(fake_groups(0))
        self.now = 0.0
        self.sizes = []

    def _run(self, step):
        num_extra = step.num_tokens - len(step.request_ids)
        self.now += PLAIN_S + TOKEN_S * num_extra
        self.sizes.append(num_extra)
        return super()._run(step)


def run(requests, **options):
    """The times of stream "a"'s tokens, outputs by request, and how many tokens beyond one the steps had."""
    device = Device()
    config = fake_config(
        num_blocks=700, max_model_len=2048, max_num_seqs=8, max_num_batched_tokens=2048, **options
    )
    core = EngineCore(config, device, clock=lambda: device.now)
    core.start()
    times, outputs = [], {}
    core.add(requests[0])
    while core.has_work() or len(outputs) < len(requests):
        if len(times) == 20:
            for request in requests[1:]:
                core.add(request)
        for output in core.step().outputs:
            outputs.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.request_id == "a":
                times.append(device.now)
    return times, outputs, device.sizes


def stream(kind=RequestOutputKind.DELTA, max_tokens=120):
    sampling = SamplingParams(max_tokens=max_tokens, output_kind=kind)
    return fake_request("a", [1, 2, 3], max_tokens, sampling=sampling)


def final_only(request_id, prompt, max_tokens=2):
    sampling = SamplingParams(max_tokens=max_tokens, output_kind=RequestOutputKind.FINAL_ONLY)
    return fake_request(request_id, prompt, max_tokens, sampling=sampling)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("prompts", [[LONG], [LONG, [6] * 700, [7] * 90]])
def test_a_stream_goes_on_beside_long_prompts(prompts, steps_in_flight):
    requests = [stream(), *(final_only(f"p{i}", prompt) for i, prompt in enumerate(prompts))]
    times, outputs, sizes = run(requests, steps_in_flight=steps_in_flight)
    gaps = [later - sooner for sooner, later in pairwise(times)]
    assert sorted(gaps)[-4] <= 1.2 * STEP_S, "all but a few steps that were planned before much was known"
    assert max(gaps) <= 4 * STEP_S
    busy = [size for size in sizes[1:] if size]
    assert sorted(busy)[len(busy) // 2] >= 30, "no smaller than they need be"
    for request in requests:
        assert outputs[request.request_id] == expected_output(request, 2048)[0]


@pytest.mark.parametrize(
    "requests",
    [
        [fake_request("a", LONG, 3)],
        [stream(RequestOutputKind.FINAL_ONLY, 40), fake_request("b", LONG, 3)],
        [stream(max_tokens=20), final_only("b", LONG)],
    ],
    ids=["alone", "beside one that nobody watches", "behind a stream"],
)
def test_a_prompt_that_keeps_nobody_waiting_is_computed_at_once(requests):
    _, _, sizes = run(requests)
    assert max(sizes) == len(LONG) - 1


def test_prompts_that_may_not_be_split_are_not():
    _, outputs, sizes = run([stream(), final_only("b", LONG)], enable_chunked_prefill=False)
    assert max(sizes) == len(LONG) - 1 and len(outputs["b"]) == 2


@pytest.mark.parametrize("fixed_s", [0.03, 0.07, 0.095, 0.2])
def test_a_fixed_time_does_not_starve_the_prompt(fixed_s):
    """Cut in proportion to the time alone, steps of which 95 ms are fixed would end at LEAST_TOKENS."""
    pace, token_s = PromptPace(), 0.0005
    pace.note(3, fixed_s + 3 * token_s)
    took = []
    for _ in range(60):
        num_tokens = pace.num_tokens()
        took.append((num_tokens, fixed_s + num_tokens * token_s))
        pace.note(*took[-1])
    for num_tokens, took_s in took[30:]:
        assert took_s <= 1.3 * max(STEP_S, 2 * fixed_s)
        assert num_tokens > 1.2 * LEAST_TOKENS
