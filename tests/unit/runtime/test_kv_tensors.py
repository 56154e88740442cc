"""KVTensors: copies between blocks and host cells, against one copy after the other on plain lists."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.base.errors import Unsupported
from octavo.messages.kv import CachePlan, HeadsKV, KVCacheGroup
from octavo.messages.step import Place, Tier
from octavo.runtime.worker.kv_tensors import KVTensors, group_layers

NUM_BLOCKS, NUM_HOST = 6, 3
BLOCK = st.builds(Place, st.just(Tier.POOL), st.integers(0, NUM_BLOCKS - 1))
HOST = st.builds(Place, st.just(Tier.HOST), st.integers(0, NUM_HOST - 1))
COPIES = st.lists(st.tuples(BLOCK, BLOCK) | st.tuples(BLOCK, HOST) | st.tuples(HOST, BLOCK), max_size=12)


def make(num_host_blocks=NUM_HOST, device="cpu"):
    spec = HeadsKV(2, 4, "float32", 64)
    plan = CachePlan([KVCacheGroup(spec, (0, 2)), KVCacheGroup(spec, (1,))], NUM_BLOCKS, 3, num_host_blocks)
    return KVTensors(plan, torch.device(device))


def is_of(view, tensor):
    """Whether a view shows all of a tensor's memory."""
    return view.data_ptr() == tensor.data_ptr() and view.nbytes == tensor.nbytes


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@settings(deadline=None)
@given(copies=COPIES)
def test_copies_are_done_one_after_the_other(device, copies):
    cache = make(device=device)
    contents = [*range(1, NUM_BLOCKS + 1), *[0] * NUM_HOST]
    for tensor in cache.tensors:
        tensor[:] = torch.arange(1, NUM_BLOCKS + 1, device=device)[:, None]
    cache.copy_blocks(copies)
    for source, target in copies:
        contents[target.tier * NUM_BLOCKS + target.number] = contents[
            source.tier * NUM_BLOCKS + source.number
        ]
    for tensor in cache.tensors:
        assert [set(block.unique().tolist()) for block in tensor] == [{i} for i in contents[:NUM_BLOCKS]]
    cache.copy_blocks([(Place(Tier.HOST, i), Place(Tier.POOL, i)) for i in range(NUM_HOST)])
    for tensor in cache.tensors:
        assert [block.max().item() for block in tensor[:NUM_HOST]] == contents[NUM_BLOCKS:]


@pytest.mark.parametrize("num_host_blocks", [0, NUM_HOST])
def test_memory_can_be_given_up_and_taken_back(num_host_blocks):
    cache = make(num_host_blocks)
    cache.tensors[0][1] = 5
    cache.free()
    assert cache.num_bytes == 0
    cache.allocate()
    assert not cache.tensors[0].any() and is_of(cache.by_layer[2], cache.tensors[1])
    targets = [Place(Tier.POOL, 2)] + [Place(Tier.HOST, 0)] * (num_host_blocks > 0)
    cache.copy_blocks([(Place(Tier.POOL, 1), target) for target in targets])


SMALL, LARGE = HeadsKV(2, 4, "float32", 64), HeadsKV(1, 12, "float32", 96)


def test_layers_of_different_sizes_share_blocks():
    groups = group_layers([SMALL, LARGE, SMALL, LARGE, SMALL, SMALL], 4)
    assert groups == [KVCacheGroup(SMALL, (0, 2)), KVCacheGroup(SMALL, (4, 5)), KVCacheGroup(LARGE, (1, 3))]
    cache = KVTensors(CachePlan(groups, 5, 4), torch.device("cpu"))
    assert [tensor.shape for tensor in cache.tensors] == [(5, 384)] * 2 and cache.num_bytes == 3840
    assert [cache.by_layer[layer].shape for layer in (0, 1)] == [(5, 2, 6, 2, 4), (5, 2, 4, 1, 12)]
    for tensor, layers in zip(cache.tensors, [(0, 1, 4), (2, 3, 5)], strict=True):
        assert all(is_of(cache.by_layer[layer], tensor) for layer in layers)
    cache.by_layer[3][4, 1, 3, 0, 11] = float("nan")
    assert not cache.all_finite(cache.copy_of(4), 2) and cache.all_finite(cache.copy_of(3), 2)


def test_a_block_holds_whole_tokens_of_all_layers():
    with pytest.raises(Unsupported, match=r"keep 64, 96 bytes .* blocks of 5 .* a multiple of 2\."):
        group_layers([SMALL, LARGE], 5)
