"""KVTensors: copies between blocks and host slots, against one copy after the other on plain lists."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.messages.kv import CachePlan, KVCacheGroup, KVCacheSpec
from octavo.runtime.worker.kv_tensors import KVTensors

NUM_BLOCKS, NUM_HOST = 6, 3
BLOCK = st.integers(0, NUM_BLOCKS - 1)
HOST = st.integers(NUM_BLOCKS, NUM_BLOCKS + NUM_HOST - 1)
COPIES = st.lists(st.tuples(BLOCK, BLOCK) | st.tuples(BLOCK, HOST) | st.tuples(HOST, BLOCK), max_size=12)


def make(num_host_blocks=NUM_HOST, device="cpu"):
    spec = KVCacheSpec(num_kv_heads=2, head_dim=4, bytes_per_token=64)
    plan = CachePlan([KVCacheGroup(spec, (0, 2)), KVCacheGroup(spec, (1,))], NUM_BLOCKS, 3, num_host_blocks)
    return KVTensors(plan, torch.float32, torch.device(device))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@settings(deadline=None)
@given(copies=COPIES)
def test_copies_are_done_one_after_the_other(device, copies):
    cache = make(device=device)
    contents = [*range(1, NUM_BLOCKS + 1), *[0] * NUM_HOST]
    for tensor in cache.tensors:
        tensor[:] = torch.arange(1, NUM_BLOCKS + 1, device=device).view(-1, 1, 1, 1, 1)
    cache.copy_blocks(copies)
    for source, target in copies:
        contents[target] = contents[source]
    for tensor in cache.tensors:
        assert [set(block.unique().tolist()) for block in tensor] == [{i} for i in contents[:NUM_BLOCKS]]
    cache.copy_blocks([(NUM_BLOCKS + slot, slot) for slot in range(NUM_HOST)])
    for tensor in cache.tensors:
        assert [block.max().item() for block in tensor[:NUM_HOST]] == contents[NUM_BLOCKS:]


@pytest.mark.parametrize("num_host_blocks", [0, NUM_HOST])
def test_memory_can_be_given_up_and_taken_back(num_host_blocks):
    cache = make(num_host_blocks)
    cache.tensors[0][1] = 5.0
    cache.free()
    assert cache.num_bytes == 0
    cache.allocate()
    assert not cache.tensors[0].any() and cache.by_layer[2] is cache.tensors[1]
    cache.copy_blocks([(1, 2)] + ([(1, NUM_BLOCKS)] if num_host_blocks else []))
