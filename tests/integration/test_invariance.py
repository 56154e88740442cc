"""However requests are batched, chunked, cached, preempted or spread, they get the same tokens (float32)."""

import random

import pytest

from octavo import SamplingParams

pytestmark = pytest.mark.matrix(3)

NUM_TOKENS = 40


def prompts(count, vocab_size=128, shared=0):
    generator = random.Random(5)
    beginning = [generator.randrange(vocab_size) for _ in range(shared)]
    return [
        beginning + [generator.randrange(vocab_size) for _ in range(generator.randint(3, 90))]
        for _ in range(count)
    ]


def params(count, **options):
    """Greedy and sampled requests in turn."""
    return [
        SamplingParams(
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            detokenize=False,
            temperature=0.0 if i % 2 else 1.0,
            seed=i,
            top_p=0.9 if i % 4 == 0 else 1.0,
            **options,
        )
        for i in range(count)
    ]


def tokens(llm, work, wanted):
    outputs = llm.generate(work, wanted, use_tqdm=False)
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


@pytest.fixture
def reference(tiny_model, make_llm):
    """Each request on its own, nothing cached."""

    def run(work, wanted):
        llm = make_llm(tiny_model, enable_prefix_caching=False)
        return [tokens(llm, [prompt], [param])[0] for prompt, param in zip(work, wanted, strict=True)]

    return run


def test_a_batch_of_32_equals_one_at_a_time(tiny_model, make_llm, reference):
    work, wanted = prompts(32), params(32)
    assert tokens(make_llm(tiny_model), work, wanted) == reference(work, wanted)


@pytest.mark.parametrize("budget", [8, 33])
def test_chunked_equals_whole(tiny_model, make_llm, reference, budget):
    work, wanted = prompts(8), params(8)
    llm = make_llm(tiny_model, max_num_batched_tokens=budget, max_num_seqs=8)
    assert tokens(llm, work, wanted) == reference(work, wanted)


def test_prefix_hits_change_nothing(tiny_model, make_llm, reference):
    work, wanted = prompts(8, shared=70), params(8)
    llm = make_llm(tiny_model)
    expected = reference(work, wanted)
    assert tokens(llm, work, wanted) == expected
    again = llm.generate(work, wanted, use_tqdm=False)
    assert [[c.token_ids for c in output.outputs] for output in again] == expected
    assert all(output.num_cached_tokens >= 64 for output in again)
    assert llm.reset_prefix_cache()
    assert llm.generate(work[:1], wanted[:1], use_tqdm=False)[0].num_cached_tokens == 0


def test_preemption_changes_nothing(tiny_model, make_llm, reference):
    work, wanted = prompts(12), params(12)
    llm = make_llm(tiny_model, num_gpu_blocks_override=115, block_size=4, max_model_len=140)
    assert tokens(llm, work, wanted) == reference(work, wanted)
    assert llm.llm_engine.stats.num_preemptions > 0, "the pool was not tight enough to prove anything"


def test_two_steps_in_flight_change_nothing(tiny_model, make_llm, reference):
    work, wanted = prompts(8), params(8)
    assert tokens(make_llm(tiny_model, steps_in_flight=2), work, wanted) == reference(work, wanted)


@pytest.mark.parametrize("block_size", [4, 8, 32])
def test_block_sizes_change_nothing(tiny_model, make_llm, reference, block_size):
    work, wanted = prompts(6), params(6)
    assert tokens(make_llm(tiny_model, block_size=block_size), work, wanted) == reference(work, wanted)


def test_four_sequences_are_four_seeds(tiny_model, make_llm):
    [prompt] = prompts(1)
    llm = make_llm(tiny_model)

    def sampled(**options):
        return SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False, **options)

    [together] = tokens(llm, [prompt], [sampled(n=4, seed=11)])
    alone = [tokens(llm, [prompt], [sampled(seed=11 + i)])[0][0] for i in range(4)]
    assert together == alone
    assert len({tuple(ids) for ids in together}) == 4


def test_siblings_share_the_prompt(tiny_llama, make_llm):
    """n = 4 on a prompt of 10 blocks and a half must not take four times the blocks."""
    llm = make_llm(tiny_llama, block_size=4, num_gpu_blocks_override=10 + 4 * 3 + 2, max_model_len=64)
    wanted = SamplingParams(n=4, seed=0, max_tokens=8, ignore_eos=True, detokenize=False)
    prompt = [i % 100 for i in range(42)]
    llm.generate([prompt], wanted, use_tqdm=False)
    assert llm.llm_engine.stats.num_preemptions == 0


def test_logprobs_do_not_depend_on_the_batch(tiny_model, make_llm):
    work, wanted = prompts(8), params(8, logprobs=3)
    llm = make_llm(tiny_model, enable_prefix_caching=False)
    together = llm.generate(work, wanted, use_tqdm=False)
    for prompt, param, output in zip(work, wanted, together, strict=True):
        [alone] = llm.generate([prompt], param, use_tqdm=False)
        assert output.outputs[0].logprobs == alone.outputs[0].logprobs
