"""The engine on a GPU in float32: graphs, caching, chunks, preemption and overlap change no token."""

import pytest
import torch

from octavo import SamplingParams
from octavo.runtime.attention.paged import PagedBackend
from octavo.runtime.worker import prepare
from octavo.runtime.worker.cuda_graphs import CUDAGraphs
from octavo.runtime.worker.model_runner import ModelRunner
from tests.integration.test_invariance import params, prompts, tokens

pytestmark = pytest.mark.gpu


@pytest.fixture
def expected(tiny_model, make_llm):
    """A plain engine's tokens: nothing recorded, nothing cached, nothing cut, one step at a time."""

    def run(work, wanted):
        llm = make_llm(tiny_model, enforce_eager=True, enable_prefix_caching=False, steps_in_flight=1)
        [report] = llm.collective_rpc("describe")
        assert (report["device"], report["kernels"]) == ("cuda:0", "triton")
        return tokens(llm, work, wanted)

    return run


@pytest.mark.parametrize(
    "options",
    [
        {"steps_in_flight": 1},
        {"steps_in_flight": 2},
        {"steps_in_flight": 2, "enforce_eager": True},
        {"max_num_batched_tokens": 33, "max_num_seqs": 8},
        {"block_size": 16, "num_gpu_blocks_override": 400},
        {"num_gpu_blocks_override": 115, "block_size": 4, "max_model_len": 140},
    ],
    ids=["graphs", "graphs_overlap", "overlap", "chunks", "small_blocks", "preemption"],
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


def test_common_beginnings_on_gpu(tiny_llama, make_llm, monkeypatch):
    """Decoding requests that share a prefix, and some that do not, by the kernel that reads it once."""
    monkeypatch.setattr(prepare, "_COMMON_TOKENS", 64)
    monkeypatch.setattr(prepare, "_FEWEST_ALIKE", 4)
    shapes, run = set(), CUDAGraphs._run
    monkeypatch.setattr(CUDAGraphs, "_run", lambda *a: (shapes.add(a[1]), run(*a))[1])
    work, wanted = prompts(9, shared=130) + prompts(1), params(10)
    recorded = tokens(make_llm(tiny_llama, block_size=16), work, wanted)
    plain = {"enforce_eager": True, "enable_prefix_caching": False, "steps_in_flight": 1}
    assert recorded == tokens(make_llm(tiny_llama, **plain), work, wanted)
    assert any(shape.common_start for shape in shapes)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_no_step_waits_for_the_device(tiny_model, make_llm, monkeypatch):
    """Whatever requests ask for, giving a step out makes no call that waits (torch watches its own)."""
    execute, num_decoded = ModelRunner.execute, []

    def watched(runner, step):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return execute(runner, step)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    wanted = [
        SamplingParams(max_tokens=24, ignore_eos=True, seed=7, **options)
        for options in (
            {"temperature": 0.0},
            {"temperature": 1.0},
            {"temperature": 1.0, "top_k": 5},
            {"temperature": 1.0, "top_p": 0.7, "min_p": 0.01},
            {"temperature": 0.0, "logprobs": 3},
            {"temperature": 1.0, "repetition_penalty": 1.2, "presence_penalty": 0.5},
            {"temperature": 0.0, "logit_bias": {3: 2.0}, "min_tokens": 5},
            {"temperature": 1.0, "allowed_token_ids": [1, 2, 3, 4]},
        )
    ]
    llm = make_llm(tiny_model, steps_in_flight=2)
    run = CUDAGraphs._run
    monkeypatch.setattr(CUDAGraphs, "_run", lambda *a: (num_decoded.append(1), run(*a))[1])
    monkeypatch.setattr(ModelRunner, "execute", watched)
    mixed = tokens(llm, prompts(8), wanted)
    alone = [tokens(llm, [prompt], [param])[0] for prompt, param in zip(prompts(8), wanted, strict=True)]
    assert mixed == alone
    assert all(len(ids) == 24 for [ids] in mixed), "a request ended early"
    assert len(num_decoded) > 8 * 20


def test_memory_of_graphs_is_given_back(tiny_llama, make_llm):
    work, wanted = prompts(6), params(6)
    llm = make_llm(tiny_llama)
    expected = tokens(llm, work, wanted)
    for _ in range(2):
        llm.sleep(level=2)
        llm.wake_up()
        assert tokens(llm, work, wanted) == expected


def test_cache_of_8_bits(tiny_model, make_llm, monkeypatch):
    """Nothing but the format's rounding: a cache of 32 bits whose contents are rounded so gives the same."""
    wanted = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)

    def scores(**options):
        llm = make_llm(tiny_model, max_num_batched_tokens=16, num_gpu_blocks_override=64, **options)
        outputs = llm.generate(prompts(4), wanted, use_tqdm=False)
        return torch.tensor([next(iter(s.values())).logprob for o in outputs for s in o.prompt_logprobs[1:]])

    exact, narrow = scores(enforce_eager=True), scores(kv_cache_dtype="fp8")
    attend = PagedBackend.attend

    def rounded(backend, q, cache, *rest):
        cache.copy_(cache.clamp(-448, 448).to(torch.float8_e4m3fn))
        return attend(backend, q, cache, *rest)

    monkeypatch.setattr(PagedBackend, "attend", rounded)
    expected = scores(enforce_eager=True)
    torch.testing.assert_close(narrow, expected, atol=2e-3, rtol=0)
    assert (narrow - exact).abs().max() > 1e-3
