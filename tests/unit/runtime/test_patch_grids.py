"""Index arrays of patches, made once for each size, against their definitions, patch by patch."""

import numpy as np
import pytest
import torch

from octavo.runtime.layers.rotary import places_of
from octavo.runtime.models.qwen_vl import by_windows, corners_of
from octavo.runtime.models.vision import full_batches

GRIDS = [(1, 5, 9), (3, 4, 4), (1, 37, 37), (2, 1, 3)]


def windows_one_by_one(grids, side):
    order, counts, start = [], [], 0
    for times, rows, columns in grids:
        for _ in range(times):
            for y in range(0, rows, side):
                for x in range(0, columns, side):
                    inner = [(i, j) for i in range(y, y + side) for j in range(x, x + side)]
                    found = [start + i * columns + j for i, j in inner if i < rows and j < columns]
                    order += found
                    counts.append(len(found))
            start += rows * columns
    return order, counts


@pytest.mark.parametrize("side", [1, 4, 99])
def test_windows(side):
    for _ in range(2):  # the second time they are known
        order, counts = by_windows(GRIDS, side)
        assert (order.tolist(), counts.tolist()) == windows_one_by_one(GRIDS, side)
    other, _ = by_windows(GRIDS, 3)
    assert side == 99 or order.tolist() != other.tolist()


def test_places_stand_square_by_square():
    expected = [(y + i, x + j) for y in (0, 2) for x in (0, 2, 4) for i in (0, 1) for j in (0, 1)]
    assert places_of(4, 6, 2).T.tolist() == [list(place) for place in expected]
    assert places_of(2, 3).tolist() == [[0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2]]


def test_learned_positions_span_the_image():
    """Corners of an image have those of the square; a table that is linear is met everywhere."""
    numbers, shares = corners_of(4, 6, 2, 9)
    table = np.arange(9)[:, None] * 10.0 + np.arange(9)
    row, column = places_of(4, 6, 2)
    met = (table.ravel()[numbers] * shares).sum(0)
    np.testing.assert_allclose(met, row * 8 / 3 * 10 + column * 8 / 5, rtol=1e-6)
    assert numbers.min() == 0 and numbers.max() == 80


def test_one_copy_brings_all(monkeypatch):
    copies = []
    real = torch.Tensor.to
    monkeypatch.setattr(
        torch.Tensor, "to", lambda x, *args, **kw: copies.append(x.shape) or real(x, *args, **kw)
    )
    beside = np.arange(6).reshape(2, 3)
    [whole, parts], [sent] = full_batches([[3, 2], [1, 4]], torch.device("cpu"), beside)
    assert len(copies) == 1 and sent.tolist() == beside.tolist()
    assert whole.positions.tolist() == [0, 1, 2, 0, 1] and parts.positions.tolist() == [0, 0, 1, 2, 3]
    assert whole.cu_q_lens.tolist() == [0, 3, 5] and parts.kv_lens.tolist() == [1, 4]
    assert (whole.longest_q, parts.longest_q) == (3, 4)
