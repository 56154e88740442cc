"""The engine on a GPU in float32: caching, chunks, preemption and overlap change no token."""

import pytest

from tests.integration.test_invariance import params, prompts, tokens

pytestmark = pytest.mark.gpu


@pytest.fixture
def expected(tiny_model, make_llm):
    """A plain engine's tokens: nothing cached, nothing cut, one step at a time."""

    def run(work, wanted):
        llm = make_llm(tiny_model, enable_prefix_caching=False, steps_in_flight=1)
        [report] = llm.collective_rpc("describe")
        assert (report["device"], report["kernels"]) == ("cuda:0", "triton")
        return tokens(llm, work, wanted)

    return run


@pytest.mark.parametrize(
    "options",
    [
        {"steps_in_flight": 2},
        {"max_num_batched_tokens": 33, "max_num_seqs": 8},
        {"block_size": 16, "num_gpu_blocks_override": 400},
        {"num_gpu_blocks_override": 115, "block_size": 4, "max_model_len": 140},
    ],
    ids=["overlap", "chunks", "small_blocks", "preemption"],
)
def test_engine_on_gpu(tiny_model, make_llm, expected, options):
    work, wanted = prompts(12), params(12)
    llm = make_llm(tiny_model, **options)
    assert tokens(llm, work, wanted) == expected(work, wanted)
    if options.get("block_size") == 4:
        assert llm.llm_engine.stats.num_preemptions > 0


def test_prefix_hits_on_gpu(tiny_model, make_llm, expected):
    work, wanted = prompts(8, shared=70), params(8)
    llm = make_llm(tiny_model)
    first = tokens(llm, work, wanted)
    again = llm.generate(work, wanted, use_tqdm=False)
    assert first == expected(work, wanted)
    assert [[c.token_ids for c in output.outputs] for output in again] == first
    assert all(output.num_cached_tokens >= 64 for output in again)
