"""Inputs of a step in one buffer: where they lie, for the host and the device alike."""

import numpy as np
import pytest
import torch

from octavo.runtime.worker.packed_inputs import Packing


@pytest.mark.parametrize("rows", [1, 2, 7])
@pytest.mark.parametrize("tokens", [7, 64])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize(("is_changed", "chained"), [(False, 0), (True, 0), (False, 1)])
def test_host_and_device_read_the_same(tokens, rows, groups, is_changed, chained):
    packing = Packing(tokens, rows, groups, is_changed=is_changed, num_chained=chained)
    buffer = np.zeros(packing.size, np.int64)
    written = packing.split(buffer)
    for number, part in enumerate(written):
        part[:] = np.arange(part.size).reshape(part.shape) + 1000 * number
    read = packing.split(torch.from_numpy(buffer))
    for name, part in written._asdict().items():
        assert np.array_equal(getattr(read, name).numpy(), part), name
        assert np.shares_memory(part, buffer) or not part.size
    assert [tuple(part.shape) for part in read] == [
        (tokens,), (rows,), (tokens,), (groups, tokens), (rows,), (rows,), (rows,), (rows + 1,),
        (tokens * is_changed,), *[(rows * chained,)] * 5, (chained,),
    ]  # fmt: skip


def test_the_first_kernel_of_a_step_finds_what_it_reads():
    """See table.BeginStep: the tokens' places, then the rows in the state, without a gap."""
    packing = Packing(num_tokens=5, num_rows=3, num_groups=2, is_changed=False)
    inputs = packing.split(np.arange(packing.size))
    assert inputs.places.tolist() == [0, 1, 2, 3, 4]
    assert inputs.rows.tolist() == [5, 6, 7]
    assert packing.size == 5 + 3 + 5 + 2 * 5 + 3 + 3 + 2 + 2, "rows of int32 are filled up to whole int64"
