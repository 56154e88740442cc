"""Matrices of experts become one stack, where they lie side by side without a copy."""

import torch

from octavo.runtime.kernels.block_types import TYPES_BY_NAME
from octavo.runtime.quantization.arena import Arena
from octavo.runtime.quantization.blocks import Blocks, stack

Q8_0 = TYPES_BY_NAME["Q8_0"]
SIZE = 3 * 34


def parts_of(tensors):
    return [Blocks(tensor.view(1, 3, 34), Q8_0) for tensor in tensors]


def test_neighbours_in_one_storage_stay():
    whole = torch.arange(4 * SIZE, dtype=torch.uint8)
    stacked = stack(parts_of(whole.split(SIZE)[1:3]), Arena())
    assert stacked.data.data_ptr() == whole.data_ptr() + SIZE
    assert torch.equal(stacked.data.flatten(), whole[SIZE : 3 * SIZE])


def test_neighbours_by_chance_are_copied():
    """Two allocations may lie side by side."""
    memory = bytearray(range(2 * SIZE))
    halves = [
        torch.frombuffer(memoryview(memory)[i * SIZE : (i + 1) * SIZE], dtype=torch.uint8) for i in (0, 1)
    ]
    assert halves[1].data_ptr() == halves[0].data_ptr() + SIZE
    stacked = stack(parts_of(halves), Arena())
    assert bytes(stacked.data.flatten().tolist()) == bytes(memory)
