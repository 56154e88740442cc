"""Weights in host memory on a GPU: the same tokens, less of its memory, recorded steps and all (float32)."""

import gc

import pytest
import torch

from octavo.runtime.worker.cuda_graphs import CUDAGraphs
from tests.integration.test_invariance import params, prompts, tokens

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "options",
    [
        {"offload_group_size": 1},
        {"offload_group_size": 1, "offload_prefetch_step": 0},
        {"offload_group_size": 2, "offload_prefetch_step": 3, "steps_in_flight": 1},
        {"cpu_offload_gb": 1e-5, "max_num_batched_tokens": 33, "max_num_seqs": 8},
        {"offload_group_size": 1, "enforce_eager": True},
    ],
    ids=["all_layers", "none_ahead", "groups", "bytes_and_chunks", "eager"],
)
def test_host_weights_change_no_token(tiny_model, make_llm, options):
    work, wanted = prompts(12), params(12)
    expected = tokens(make_llm(tiny_model, enforce_eager=True, steps_in_flight=1), work, wanted)
    llm = make_llm(tiny_model, **options)
    [report] = llm.collective_rpc("describe")
    assert 0 < report["host_weight_bytes"] < report["weight_bytes"]
    assert tokens(llm, work, wanted) == expected
    assert tokens(llm, work, wanted) == expected


def test_steps_with_host_weights_are_recorded(tiny_llama, make_llm, monkeypatch):
    kinds, run = [], CUDAGraphs._run

    def noted(steps, shape, end):
        kinds.append((shape, end) in steps._captured)
        run(steps, shape, end)

    monkeypatch.setattr(CUDAGraphs, "_run", noted)
    tokens(make_llm(tiny_llama, offload_group_size=1), prompts(4), params(4))
    assert sum(kinds) > 20


def test_memory_goes_to_the_host_and_comes_back(tiny_llama, make_llm):
    options = {"kv_cache_memory_bytes": 1 << 20, "num_gpu_blocks_override": 0, "enforce_eager": True}

    def taken(**more):
        """Bytes of the GPU that an engine takes; and the engine."""
        gc.collect()
        before = torch.cuda.memory_allocated()
        llm = make_llm(tiny_llama, **options, **more)
        return torch.cuda.memory_allocated() - before, llm

    taken()[1].shutdown()  # libraries take memory once
    of_whole, whole = taken()
    whole.shutdown()
    of_rest, llm = taken(offload_group_size=1)
    [report] = llm.collective_rpc("describe")
    on_host = report["host_weight_bytes"]
    assert abs((of_whole - of_rest) - on_host // 3) < on_host // 6, "three layers, two buffers"
    work, wanted = prompts(3), params(3)
    expected = tokens(llm, work, wanted)
    llm.sleep(level=2)
    llm.wake_up()
    assert tokens(llm, work, wanted) == expected
