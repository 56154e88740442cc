"""Several GPUs: the tokens of one, captured or not; sums over ranks to the bit, by kernels of our own."""

import json
import subprocess
import sys

import pytest

from octavo import LLM, SamplingParams
from tests.conftest import ROOT
from tests.gpu import test_speculation_on_gpu as speculation
from tests.gpu.test_speculation_on_gpu import folders  # noqa: F401  # a fixture
from tests.integration.test_invariance import params, prompts, tokens
from tests.integration.test_replaying_ranks import REPLAYING
from tests.tiny_models import make_oracle, save, tiny_config

pytestmark = pytest.mark.multi_gpu
TWO_RANKS = {"tensor_parallel_size": 2}
TWO_STAGES = {"pipeline_parallel_size": 2}


def test_replicas_share_experts(tmp_path, make_llm):
    """Captured steps gather all tokens; the prompts of 20 requests are sent, as they are long together."""
    model = save(make_oracle(tiny_config("Qwen3MoeForCausalLM")), tmp_path / "experts")
    wanted = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True, detokenize=False)
    work = [*prompts(12), *([i] * 200 for i in range(1, 9))]
    one = tokens(make_llm(model), work, wanted)
    for options in ({}, {}, {"enforce_eager": True}):
        shared = make_llm(model, data_parallel_size=2, enable_expert_parallel=True, **options)
        assert tokens(shared, work, wanted) == one
        assert tokens(shared, work[:1], wanted) == one[:1]


@pytest.mark.parametrize("sizes", [TWO_RANKS, TWO_STAGES], ids=["ranks", "stages"])
def test_two_equal_one(tiny_llama, make_llm, sizes):
    """Greedy, because sums in another order may move a draw."""
    wanted = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True, detokenize=False)
    work = prompts(12)
    one = tokens(make_llm(tiny_llama), work, wanted)
    assert tokens(make_llm(tiny_llama, **sizes), work, wanted) == one
    assert tokens(make_llm(tiny_llama, enforce_eager=True, **sizes), work, wanted) == one


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "DeepseekV2ForCausalLM"])
def test_ranks_divide_a_cache(tmp_path, make_llm, kind):
    """In captured steps, chunks of prompts and hits in the cache, of one key head and of latents."""
    config = tiny_config(kind)
    model = save(
        make_oracle(config | ({} if "kv_lora_rank" in config else {"num_key_value_heads": 1})), tmp_path
    )
    wanted = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True, detokenize=False)
    work, options = prompts(12), {"max_num_batched_tokens": 64, "block_size": 16}
    one = tokens(make_llm(model, **options), work, wanted)
    divided = make_llm(
        model, **TWO_RANKS, **options, decode_context_parallel_size=2, cp_kv_cache_interleave_size=4
    )
    assert tokens(divided, work, wanted) == one
    assert tokens(divided, work, wanted) == one


@pytest.fixture(scope="module", params=[TWO_RANKS, TWO_STAGES], ids=["ranks", "stages"])
def plain(request, folders):  # noqa: F811
    """Options of engines over two GPUs, and what they say without drafts."""
    options = speculation.COMMON | {"num_gpu_blocks_override": 400} | request.param
    with LLM(folders[0], **options) as llm:
        return options, speculation.texts(llm)


@pytest.mark.parametrize("method", ["ngram", "suffix", "ngram_gpu", "draft_model", "eagle3"])
def test_drafts_change_nothing(folders, plain, method):  # noqa: F811
    """In captured steps; half of the tokens are drawn, of candidates of all ranks."""
    options, expected = plain
    config = {"speculative_config": speculation.guessing(method, *folders)}
    with LLM(folders[0], **options, **config, distributed_executor_backend=REPLAYING) as llm:
        speculation.texts(llm)
        found = speculation.texts(llm)  # suffixes are known now
        values = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
        replays = [report["replays"] for report in llm.collective_rpc("describe")]
    equal = sum(a == b for a, b in zip(found, expected, strict=True))
    assert equal >= 9, f"{equal} of {len(expected)} texts are the same"
    assert min(replays) > 20
    assert "ngram" in method or values["vllm:spec_decode_num_draft_tokens"] > 100
    if method in ("suffix", "draft_model"):
        assert values["vllm:spec_decode_num_accepted_tokens"] > 100


def test_captured_equals_eager_and_itself(tiny_llama, make_llm):
    work, wanted = prompts(12), params(12)
    first, again, eager = (
        tokens(make_llm(tiny_llama, **TWO_RANKS, **options), work, wanted)
        for options in ({}, {}, {"enforce_eager": True})
    )
    assert first == again == eager


def test_sums_are_in_the_order_of_ranks():
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "gpu_parallel.py"),
        "--gpus",
        "2",
        "--parts",
        "sums 2",
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["row"] for row in rows} == {"limits", "sums", "replays"}
    compared = [row for row in rows if row["row"] == "sums"]
    assert sum("one_us" in row for row in compared) >= 8
    assert all(row.get("one_equal", True) and row.get("two_equal", True) for row in compared)
    assert all(row["equal"] == row["of"] for row in rows if row["row"] == "replays")
