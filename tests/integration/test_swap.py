"""The host tier on tiny models: evicted and preempted blocks come back as they were."""

import random

import pytest

from octavo import SamplingParams

TIGHT = {"num_gpu_blocks_override": 115, "block_size": 4, "max_model_len": 140}


def prompts(count, length):
    generator = random.Random(9)
    return [[generator.randrange(128) for _ in range(generator.randint(*length))] for _ in range(count)]


def params(count, **options):
    """Greedy and sampled in turn."""
    common = {"max_tokens": 40, "ignore_eos": True, "detokenize": False}
    return [SamplingParams(temperature=float(i % 2), seed=i, **(common | options)) for i in range(count)]


def tokens(outputs):
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


@pytest.mark.parametrize("swap_space", [0.0001, 0.1])
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_preempted_requests_resume_with_their_blocks(tiny_model, make_llm, swap_space, steps_in_flight):
    """With room for a few blocks only, and with room for all."""
    work, wanted = prompts(12, (3, 90)), params(12)
    expected = make_llm(tiny_model).generate(work, wanted, use_tqdm=False)
    llm = make_llm(tiny_model, **TIGHT, swap_space=swap_space, steps_in_flight=steps_in_flight)
    assert tokens(llm.generate(work, wanted, use_tqdm=False)) == tokens(expected)
    stats = llm.llm_engine.stats
    assert stats.num_preemptions > 0 and stats.num_blocks_swapped_out > 0
    assert stats.num_blocks_swapped_in > 0 or swap_space < 0.1
    assert stats.num_blocks_used == 0


def test_evicted_prompts_come_back_by_their_hash(tiny_model, make_llm):
    work, wanted = prompts(12, (60, 80)), params(12, max_tokens=4)
    llm = make_llm(tiny_model, **TIGHT, swap_space=0.1)
    cold = llm.generate(work, wanted, use_tqdm=False)
    warm = llm.generate(work, wanted, use_tqdm=False)
    assert tokens(warm) == tokens(cold)
    assert all(output.num_cached_tokens >= 56 for output in warm)
    assert llm.llm_engine.stats.num_blocks_swapped_in > 0
    assert llm.reset_prefix_cache()
    assert llm.generate(work[:1], wanted[:1], use_tqdm=False)[0].num_cached_tokens == 0


def test_siblings_and_beams_under_pressure(tiny_llama, make_llm):
    work = prompts(6, (20, 50))
    wanted = [SamplingParams(n=3, seed=i, max_tokens=30, ignore_eos=True, detokenize=False) for i in range(6)]
    wanted[2] = SamplingParams(
        use_beam_search=True, best_of=4, n=2, temperature=0, max_tokens=20, ignore_eos=True, detokenize=False
    )
    expected = make_llm(tiny_llama).generate(work, wanted, use_tqdm=False)
    llm = make_llm(tiny_llama, **(TIGHT | {"num_gpu_blocks_override": 60}), swap_space=0.1)
    assert tokens(llm.generate(work, wanted, use_tqdm=False)) == tokens(expected)
    assert llm.llm_engine.stats.num_blocks_swapped_in > 0


@pytest.mark.slow
def test_two_ranks_swap_alike(tiny_llama, make_llm):
    work, wanted = prompts(8, (3, 90)), params(8)
    expected = make_llm(tiny_llama).generate(work, wanted, use_tqdm=False)
    llm = make_llm(
        tiny_llama, **(TIGHT | {"num_gpu_blocks_override": 60}), swap_space=0.1, tensor_parallel_size=2
    )
    assert tokens(llm.generate(work, wanted, use_tqdm=False)) == tokens(expected)
    assert llm.llm_engine.stats.num_blocks_swapped_in > 0
