"""Policies and time limits through the whole engine: they change when tokens come, never which."""

import time

import pytest

from octavo import AsyncLLM, EngineArgs, RequestError, SamplingParams
from octavo.engine.scheduler.policies import POLICIES

PROMPTS = [[i + 1] * (3 + 9 * i % 40) for i in range(12)]


def params(**options):
    return SamplingParams(
        ignore_eos=True, detokenize=False, **({"temperature": 0, "max_tokens": 16} | options)
    )


@pytest.fixture
def clock():
    """Seconds, moved by hand."""
    return {"now": 0.0}


@pytest.fixture
def timed(tiny_llama, make_llm, clock):
    """An engine in which every look at the clock takes a second."""

    def make(**options):
        def tick():
            clock["now"] += 1.0
            return clock["now"]

        llm = make_llm(tiny_llama, **options)
        llm.llm_engine.core.client._core._clock = tick
        return llm.llm_engine

    return make


def run(engine):
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step() if output.finished}
    return outputs


@pytest.mark.parametrize("policy", POLICIES.names())
def test_policies_do_not_change_the_tokens(tiny_llama, make_llm, policy):
    expected = make_llm(tiny_llama).generate(PROMPTS, params(), use_tqdm=False)
    llm = make_llm(
        tiny_llama,
        scheduling_policy=policy,
        fair_weights={"a": 2.0},
        priority_aging_s=1.0,
        max_num_seqs=3,
        num_gpu_blocks_override=40,
        block_size=4,
        max_model_len=100,
    )
    outputs = llm.generate(
        PROMPTS,
        params(),
        use_tqdm=False,
        priority=[i % 3 for i in range(12)],
        tenant=["a", "b", "c"] * 4,
        deadline_s=[None, 5.0, 1.0] * 4,
    )
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
    with pytest.raises(RequestError, match=r"lengths of prompts \(12\) and tenant \(1\)"):
        llm.generate(PROMPTS, params(), use_tqdm=False, tenant=["a"])


def test_the_tokens_so_far(timed, clock):
    engine = timed()
    engine.add_request("whole", PROMPTS[3], params(max_tokens=40), clock["now"])
    whole = run(engine)["whole"].outputs[0]
    engine = timed()
    engine.add_request("part", PROMPTS[3], params(max_tokens=40, timeout_s=20), clock["now"])
    part = run(engine)["part"].outputs[0]
    assert part.finish_reason == "timeout" and whole.finish_reason == "length"
    assert 0 < len(part.token_ids) < 40 and part.token_ids == whole.token_ids[: len(part.token_ids)]
    assert engine.stats.num_timeouts == 1 and engine.stats.num_blocks_used == 0


def test_every_sequence_ends_and_so_does_who_waits(timed, clock):
    engine = timed(max_num_seqs=2)
    now = clock["now"]
    engine.add_request(
        "two", PROMPTS[1], params(n=2, seed=1, temperature=1, timeout_s=60, max_tokens=90), now
    )
    engine.step()
    engine.step()  # both of the two run
    engine.add_request("waits", PROMPTS[2], params(timeout_s=30), now)
    engine.add_request("after", PROMPTS[4], params(), now)
    outputs = run(engine)
    assert [c.finish_reason for c in outputs["two"].outputs] == ["timeout", "timeout"]
    assert all(len(c.token_ids) > 10 for c in outputs["two"].outputs)
    assert (
        outputs["waits"].outputs[0].finish_reason == "timeout" and not outputs["waits"].outputs[0].token_ids
    )
    assert outputs["after"].outputs[0].finish_reason == "length"


def test_a_beam_search_gives_its_best_so_far(timed, clock):
    engine = timed()
    search = SamplingParams(
        use_beam_search=True,
        best_of=3,
        temperature=0,
        ignore_eos=True,
        max_tokens=60,
        timeout_s=30,
        detokenize=False,
    )
    engine.add_request("beams", PROMPTS[5], search, clock["now"])
    [output] = run(engine).values()
    assert output.outputs[0].finish_reason == "timeout" and 5 < len(output.outputs[0].token_ids) < 60
    run(engine)
    assert engine.stats.num_running == engine.stats.num_waiting == 0


async def test_time_runs_out_in_another_process(tiny_llama):
    """Also while the engine is paused, and nothing but time passes there."""
    args = EngineArgs(
        model=str(tiny_llama),
        dtype="float32",
        skip_tokenizer_init=True,
        num_gpu_blocks_override=200,
        max_request_seconds=60.0,
    )
    engine = AsyncLLM.from_engine_args(args)
    try:
        await engine.start()
        await engine.pause_generation(mode="keep")
        begun_s = time.monotonic()
        outputs = [output async for output in engine.generate([1, 2], params(timeout_s=0.3), tenant="a")]
        assert outputs[-1].outputs[0].finish_reason == "timeout"
        assert 0.2 < time.monotonic() - begun_s < 3.0
        await engine.resume_generation()
        outputs = [output async for output in engine.generate([1, 2], params(), deadline_s=9)]
        assert outputs[-1].outputs[0].finish_reason == "length"
    finally:
        await engine.shutdown()
