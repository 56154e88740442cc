"""A cache in int8: what is kept of a vector, where it lies, and that a block is one piece of bytes."""

from functools import partial

import pytest
import torch

from octavo.base.errors import Unsupported
from octavo.messages.kv import CachePlan, KVCacheGroup
from octavo.messages.step import Place, Tier
from octavo.runtime.kernels.attention import HeadInputs
from octavo.runtime.kernels.cache_layout import CacheLayout, make_spec, rounded, rounded_parts
from octavo.runtime.kernels.ref.table import ref_table
from octavo.runtime.worker.kv_tensors import KVTensors

SPEC = make_spec(2, 8, torch.int8)
BLOCK_SIZE = 3


def filled(num_blocks=2):
    """A cache, and the keys and values [slots, 2, 8] that were stored in its order."""
    generator = torch.Generator().manual_seed(3)
    cache = CacheLayout(SPEC, BLOCK_SIZE).zeros(num_blocks, torch.device("cpu"))
    k, v = (torch.randn(num_blocks * BLOCK_SIZE, 2, 8, generator=generator) for _ in range(2))
    ref_table().attention.store_kv(HeadInputs(k, k.clone(), v), cache, torch.arange(num_blocks * BLOCK_SIZE))
    return cache, k, v


def test_errors_are_at_most_half_a_step():
    x = torch.randn(100, 64) * torch.logspace(-20, 20, 100)[:, None]
    values, scales = rounded(x)
    assert values.abs().amax(-1).eq(127).all()
    assert ((values * scales[:, None] - x).abs() <= 0.5001 * x.abs().amax(-1, keepdim=True) / 127).all()


def test_what_is_no_number_stays_none():
    x = torch.tensor([[1.0, float("inf")], [float("nan"), 2.0], [0.0, 1e-38], [1.0, -2.0]])
    values, scales = rounded(x)
    assert values.tolist() == [[0, 0], [0, 0], [0, 0], [64, -127]]
    assert scales.isnan().tolist() == [True, True, False, False] and scales[2] == 0


def test_bytes_of_a_block():
    """By hand: keys with their scales, then values with theirs; scales head by head."""
    cache, k, v = filled()
    content = cache[1].numpy().tobytes()
    assert len(content) == BLOCK_SIZE * SPEC.bytes_per_token == 2 * (3 * 2 * 8 + 3 * 2 * 4)
    for half, vectors in ((content[:72], k[3:]), (content[72:], v[3:])):
        values = torch.frombuffer(bytearray(half[:48]), dtype=torch.int8).view(3, 2, 8)
        scales = torch.frombuffer(bytearray(half[48:]), dtype=torch.float32).view(2, 3)
        assert torch.equal(scales.T, vectors.abs().amax(-1) / 127)
        assert torch.allclose(values * scales.T[..., None], vectors, atol=0.02)


def test_blocks_are_moved_whole():
    plan = CachePlan([KVCacheGroup(SPEC, (0, 1))], 4, BLOCK_SIZE, num_host_blocks=2)
    tensors = KVTensors(plan, torch.device("cpu"))
    assert tensors.num_bytes == plan.num_blocks * plan.bytes_per_block
    cache, *_ = filled(4)
    for layer in tensors.by_layer:
        layer.copy_(cache)
    block, cell = partial(Place, Tier.POOL), partial(Place, Tier.HOST)
    tensors.copy_blocks([(block(3), cell(0)), (block(1), block(3)), (cell(0), block(1))])
    saved = tensors.copy_of(1).numpy().tobytes()
    tensors.bring({9: saved})
    tensors.copy_blocks([(Place(Tier.STEP, 9), block(0))])
    for layer in tensors.by_layer:
        assert torch.equal(layer, cache[[3, 3, 2, 1]])


def test_blocks_with_bad_scales_are_found():
    cache, layout = filled()[0][:1], CacheLayout(SPEC, BLOCK_SIZE)
    content = cache.view(1, -1).view(torch.uint8)
    assert layout.all_finite(content)
    rounded_parts(cache)[1][0, 1, 2, 0] = float("nan")
    assert not layout.all_finite(content)
    plain = CacheLayout(make_spec(2, 8, torch.float16), BLOCK_SIZE)
    content = torch.zeros(1, plain.block_bytes, dtype=torch.uint8)
    assert plain.all_finite(content)
    plain.view(content)[0, 1, 2, 1, 7] = float("inf")
    assert not plain.all_finite(content)


def test_heads_by_fours():
    with pytest.raises(Unsupported, match="heads of 6"):
        make_spec(2, 6, torch.int8)
    assert make_spec(2, 6, torch.bfloat16).bytes_per_token == 48
