"""Memory of weights on a CPU: matrices side by side, none of them over another."""

import numpy as np
import torch

from octavo.base.gguf import BLOCK_TYPES
from octavo.runtime.quantization import arena, blocks
from octavo.runtime.quantization.arena import Arena
from octavo.runtime.quantization.blocks import Blocks, join, stack

CPU = torch.device("cpu")
Q8_0 = next(kind for kind in BLOCK_TYPES.values() if kind.name == "Q8_0")


def test_tensors_lie_side_by_side(monkeypatch):
    """Those of a chunk, one that begins the next, and one that is larger than any."""
    monkeypatch.setattr(arena, "_CHUNK_BYTES", 1 << 16)
    memory, shapes = Arena(), [(3, 5), (100, 70), (7,), (200, 60), (1 << 15, 2), (1, 1)]
    made = [memory.empty(shape, torch.bfloat16, CPU).fill_(i) for i, shape in enumerate(shapes)]
    for i, (tensor, shape) in enumerate(zip(made, shapes, strict=True)):
        assert tensor.shape == shape and tensor.is_contiguous() and tensor.data_ptr() % 64 == 0
        assert bool((tensor == i).all()), "another tensor was written over it"
    assert made[1].data_ptr() - made[0].data_ptr() == 64
    assert made[5].data_ptr() - made[3].data_ptr() == -(-made[3].nbytes // 64) * 64


def test_nothing_and_other_devices_are_torchs():
    memory = Arena()
    assert memory.empty((0, 5), torch.float32, CPU).shape == (0, 5)
    assert memory.empty((2, 5), torch.float32, torch.device("meta")).is_meta
    assert memory._chunk is None


def test_what_is_joined_and_what_stays(monkeypatch):
    parts = [Blocks(torch.full((rows, 68), rows, dtype=torch.uint8), Q8_0) for rows in (3, 4)]
    both = join(parts, Arena())
    assert torch.equal(both.data, torch.cat([part.data for part in parts])) and both.type is Q8_0
    assert join(parts[:1], Arena()).data.data_ptr() != parts[0].data.data_ptr()
    monkeypatch.setattr(blocks, "_MOST_COPIED", 68)
    assert join(parts[:1], Arena()) is parts[0]
    on_device = Blocks(torch.empty((1, 34), dtype=torch.uint8, device="meta"), Q8_0)
    assert join([on_device], Arena()) is on_device


def test_stacked_matrices_may_only_look_like_neighbours():
    """Memory of two owners may follow one another; a view of the first does not reach into the second."""
    bytes_ = np.arange(48, dtype=np.uint8)
    parts = [Blocks(torch.from_numpy(bytes_[i : i + 24]).view(1, 2, 12), Q8_0) for i in (0, 24)]
    assert parts[0].data.data_ptr() + 24 == parts[1].data.data_ptr()
    assert stack(parts, Arena()).data.flatten().tolist() == list(range(48))
    whole = torch.from_numpy(bytes_).view(2, 2, 12)
    stacked = stack([Blocks(whole[i : i + 1], Q8_0) for i in range(2)], Arena())
    assert stacked.data.data_ptr() == whole.data_ptr()
