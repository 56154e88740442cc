"""kv_cache_dtype="int8": near the exact cache, the same in every batch; blocks that travel as others do."""

import random

import pytest

from octavo import EngineArgs, SamplingParams
from octavo.base.errors import Unsupported
from octavo.config import KVTransferConfig
from octavo.config.resolve import resolve
from octavo.engine.memory_plan import plan_memory
from tests.tiny_models import make_oracle, save, tiny_config

pytestmark = pytest.mark.matrix(3)

INT8 = {"kv_cache_dtype": "int8"}
TIGHT = {"num_gpu_blocks_override": 115, "block_size": 4, "max_model_len": 140}


def prompts(count, length=(3, 90), vocab_size=128):
    generator = random.Random(9)
    return [
        [generator.randrange(vocab_size) for _ in range(generator.randint(*length))] for _ in range(count)
    ]


def params(**options):
    common = {"max_tokens": 20, "temperature": 0.0, "ignore_eos": True, "detokenize": False}
    return SamplingParams(**(common | options))


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def scores(llm, work):
    """Log probabilities of the prompts' own tokens."""
    wanted = params(max_tokens=1, prompt_logprobs=0)
    return [
        entry[token].logprob
        for ids, output in zip(work, llm.generate(work, wanted, use_tqdm=False), strict=True)
        for token, entry in zip(ids[1:], output.prompt_logprobs[1:], strict=True)
    ]


def largest_difference(a, b):
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def test_close_to_the_exact_cache(tiny_model, make_llm):
    work = prompts(6)
    exact, narrow = (scores(make_llm(tiny_model, **options), work) for options in ({}, INT8))
    assert 1e-6 < largest_difference(exact, narrow) < 0.05


def test_close_on_a_real_model(smollm2_path, make_llm):
    options = {"dtype": "auto", "activations": "float32", "max_model_len": 512, "cpu_threads": 2}
    text = [[int(x) for x in range(1000, 1240, 3)]]
    exact, narrow = (
        scores(make_llm(smollm2_path, **options, **cache), text)
        for cache in ({"kv_cache_dtype": "float32"}, INT8)
    )
    assert abs(sum(exact) - sum(narrow)) / len(exact) < 0.02
    assert 1e-4 < largest_difference(exact, narrow) < 0.5


@pytest.mark.parametrize("kernels", ["compiled", pytest.param("references", marks=pytest.mark.slow)])
def test_the_same_tokens_in_every_batch(tiny_model, make_llm, monkeypatch, kernels):
    """Alone, together, in chunks, with one thread and with two."""
    if kernels == "references":
        monkeypatch.setenv("OCTAVO_NO_CPU_KERNELS", "1")
    work, wanted = prompts(8), params()
    alone = make_llm(tiny_model, **INT8, enable_prefix_caching=False, cpu_threads=1)
    expected = [tokens(alone.generate([ids], wanted, use_tqdm=False))[0] for ids in work]
    for options in ({"cpu_threads": 2}, {"max_num_batched_tokens": 8, "max_num_seqs": 8}):
        llm = make_llm(tiny_model, **INT8, **options)
        assert tokens(llm.generate(work, wanted, use_tqdm=False)) == expected
        assert tokens(llm.generate(work, wanted, use_tqdm=False)) == expected, "from cached prefixes"


def test_swapped_blocks_come_back(tiny_model, make_llm):
    work, wanted = prompts(12), params(max_tokens=40)
    expected = tokens(make_llm(tiny_model, **INT8).generate(work, wanted, use_tqdm=False))
    llm = make_llm(tiny_model, **INT8, **TIGHT, swap_space=0.1)
    assert tokens(llm.generate(work, wanted, use_tqdm=False)) == expected
    stats = llm.llm_engine.stats
    assert stats.num_preemptions > 0 and stats.num_blocks_swapped_in > 0


def test_blocks_are_shared_through_files(tiny_model, make_llm, tmp_path):
    work = prompts(3, (70, 70))
    where = KVTransferConfig(
        kv_connector="SharedStorageConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"shared_storage_path": str(tmp_path)},
    )
    found = []
    for _ in range(2):
        llm = make_llm(tiny_model, **INT8, kv_transfer_config=where)
        outputs = llm.generate(work, params(max_tokens=6), use_tqdm=False)
        found.append((tokens(outputs), [output.num_cached_tokens for output in outputs]))
        llm.shutdown()
    assert found[0][0] == found[1][0]
    assert (found[0][1], found[1][1]) == ([0] * 3, [64] * 3)


def test_the_plan_has_nearly_twice_the_tokens(smollm2_path):
    plans = [
        plan_memory(
            resolve(
                EngineArgs(
                    model=str(smollm2_path),
                    max_model_len=512,
                    device="cpu",
                    kv_cache_memory_bytes=1 << 28,
                    kv_cache_dtype=kind,
                )
            )
        )
        for kind in ("bfloat16", "int8_per_token_head")
    ]
    wide, narrow = plans
    assert narrow.kv_bytes_per_token == 2 * 30 * 3 * (64 + 4)
    assert narrow.num_tokens / wide.num_tokens == pytest.approx(128 / 68, rel=0.01)


def test_heads_that_it_cannot_take(tmp_path, make_llm):
    config = tiny_config("LlamaForCausalLM") | {"head_dim": 6}
    path = save(make_oracle(config), tmp_path)
    with pytest.raises(Unsupported, match="heads of 6"):
        make_llm(path, **INT8)
