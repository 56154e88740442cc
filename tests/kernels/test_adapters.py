"""Changes by adapters in Triton against the reference: ragged sizes, ranks of any number, all types."""

from functools import partial

import pytest
import torch

from tests.triton_here import DEVICE, HAS_GPU  # skips where there is no Triton

# isort: split
from octavo.runtime.kernels.adapters import ENTRY, LowRank, LowRankTable
from octavo.runtime.kernels.ref.adapters import add_low_rank
from octavo.runtime.kernels.triton.table import cuda_table

SIZES = [(48, (48, 16, 16)), (577, (1030,)), (2064, (7, 520, 1))]
MOST_RANK = 40
KERNELS = cuda_table()
TRITON = KERNELS.adapters
TYPES = [torch.float32, torch.float16, *[torch.bfloat16] * HAS_GPU]
"""The interpreter's dot takes no bfloat16."""


def make_table(dtype, inputs, outputs, device=DEVICE):
    """Slots of ranks 1 to 33: of one part or many, the odd ones with factors and a bias."""
    generator = torch.Generator().manual_seed(0)
    random = lambda *shape: torch.randn(*shape, generator=generator).to(device)  # noqa: E731
    bounds = tuple(sum(outputs[:i]) for i in range(len(outputs) + 1))
    entries = torch.zeros(6, ENTRY, dtype=torch.int64, device=device)
    on_device = torch.tensor(bounds, dtype=torch.int32, device=device)
    table = LowRankTable(entries, on_device, dtype, bounds, MOST_RANK)
    for slot, (rank, parts) in enumerate([(1, 1), (5, len(outputs)), (16, 1), (33, len(outputs))], 1):
        down, up = random(rank * parts, inputs).to(dtype), random(rank, bounds[-1]).to(dtype)
        ends = (random(bounds[-1]), random(bounds[-1])) if slot % 2 else (None, None)
        table.put(slot, LowRank(down, up, parts, *ends))
    return table, random  # slot 5 changes other products only


def changed(x, out, slots, table, bias):
    groups, found = TRITON.group(slots, len(table.entries)), out.clone()
    TRITON.add_low_rank(x, found, groups, table, bias)
    return found


@pytest.mark.matrix(4)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("tokens", [1, 37, 300] if HAS_GPU else [1, 150])
def test_kernels_are_the_reference(dtype, sizes, tokens):
    """A row's bits depend on no other, and rows of the base stay as they are."""
    table, random = make_table(dtype, *sizes)
    outputs = table.num_outputs
    x, bias = random(tokens, sizes[0] + 16)[:, : sizes[0]].to(dtype), random(outputs).to(dtype)
    out = random(tokens, outputs).to(dtype)
    slots = (torch.arange(tokens, device=DEVICE, dtype=torch.int32) * 7 + 4) % 6
    wanted = out.clone()
    add_low_rank(x, wanted, slots, table, bias)
    found = changed(x, out, slots, table, bias)
    torch.testing.assert_close(found, wanted, rtol=2e-2 if dtype != torch.float32 else 1e-4, atol=2e-2)
    is_base = (slots == 0) | (slots == 5)
    assert torch.equal(found[is_base], out[is_base]) and not torch.equal(found, out)
    alone = slots.clone()
    alone[slots != 4] = 0
    again = changed(x, out, alone, table, bias)
    assert torch.equal(again[slots == 4], found[slots == 4])


@pytest.mark.parametrize("sizes", [(48, (48, 16, 16)), (577, (70,))], ids=str)
def test_a_single_row_s_product(sizes):
    """Every slot; one without changes gets the bits of the product alone. More rows are left to others."""
    dtype = torch.bfloat16 if HAS_GPU else torch.float16
    table, random = make_table(dtype, *sizes)
    x, weight = random(1, sizes[0]).to(dtype), 0.1 * random(table.num_outputs, sizes[0]).to(dtype)
    product = partial(KERNELS.linear.matmul, x, weight)
    for slot in range(6):
        bias = random(table.num_outputs).to(dtype) if slot in (1, 2, 5) else None
        slots, plain = torch.tensor([slot], dtype=torch.int32, device=DEVICE), product(bias)
        groups = TRITON.group(slots, len(table.entries))
        found, wanted = TRITON.multiply(x, weight, bias, groups, table), plain.float()
        add_low_rank(x, wanted, slots, table, bias)
        torch.testing.assert_close(found.float(), wanted, rtol=2e-2, atol=0.1)
        assert torch.equal(found, plain) == (slot in (0, 5))
    assert TRITON.multiply(x.expand(2, -1), weight, None, groups, table) is None
    assert TRITON.multiply(x.float(), weight.float(), None, groups, table) is None


def test_types_may_differ():
    """Adapters in float16 beside a float32 model: both are multiplied as float32."""
    table, random = make_table(torch.float16, 48, (64,))
    x, out = random(20, 48), random(20, 64)
    slots = torch.full((20,), 4, dtype=torch.int32, device=DEVICE)
    wanted = out.clone()
    add_low_rank(x, wanted, slots, table, None)
    torch.testing.assert_close(changed(x, out, slots, table, None), wanted, rtol=1e-3, atol=5e-3)


def test_a_wrong_group_shows():
    """The twin: with another's slots the tests above would fail."""
    table, random = make_table(torch.float32, 48, (64,))
    x, out = random(20, 48), random(20, 64)
    slots = torch.arange(20, dtype=torch.int32, device=DEVICE) % 4 + 1
    right, wrong = (changed(x, out, own, table, None) for own in (slots, slots.roll(1)))
    assert (right - wrong).abs().max() > 1.0


def test_no_tokens():
    table, random = make_table(torch.float32, 48, (64,))
    nothing = torch.empty(0, dtype=torch.int32, device=DEVICE)
    assert changed(random(0, 48), random(0, 64), nothing, table, None).shape == (0, 64)
