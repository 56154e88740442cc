"""Whole matrices and embeddings of adapters: kernels of GPUs and CPUs against torch, in float64."""

import pytest
import torch

from tests.triton_here import DEVICE, HAS_GPU  # skips where there is no Triton

# isort: split
from octavo.runtime.kernels.adapters import ENTRY, LowRank, LowRankTable
from octavo.runtime.kernels.cpu.library import load_library
from octavo.runtime.kernels.cpu.table import table_of
from octavo.runtime.kernels.ref.table import ref_table
from octavo.runtime.kernels.triton.table import cuda_table

CASES = [("ref", torch.float32), ("cpu", torch.float32), ("cpu", torch.bfloat16), ("triton", torch.float32)]
CASES += [("triton", torch.float16), *[("triton", torch.bfloat16)] * HAS_GPU]
IDS = 50


@pytest.fixture(scope="module")
def tables():
    return {"ref": ref_table(), "cpu": table_of(load_library(), 3), "triton": cuda_table()}


def make_table(dtype, width, device):
    """Slots 1 and 4 replace, 2 and 3 add ranks 5 and 33 to lookups, 5 does nothing."""
    generator = torch.Generator().manual_seed(0)
    random = lambda *shape: torch.randn(*shape, generator=generator).to(device)  # noqa: E731
    entries, bounds = torch.zeros(6, ENTRY, dtype=torch.int64, device=device), (0, width)
    table = LowRankTable(entries, torch.tensor(bounds, dtype=torch.int32, device=device), dtype, bounds, 40)
    for slot in (1, 4):
        table.put(slot, None, random(width, 48).to(dtype))
    for slot, rank in (2, 5), (3, 33):
        table.put(slot, LowRank(random(IDS, rank).to(dtype), random(rank, 48).to(dtype)))
    return table, random


def run(tables, kind, dtype, table, x, out, slots, bias):
    """Replace products of x; returns the outputs."""
    kernels, found = tables[kind].adapters, out.clone()
    kernels.replace(x, found, kernels.group(slots, len(table.entries)), table, bias)
    return found


@pytest.mark.parametrize(("kind", "dtype"), CASES, ids=str)
@pytest.mark.parametrize("width", [20, 600])
def test_products(tables, kind, dtype, width):
    """Rows of others stay as they are, and company changes no bit; one has a bias of its own."""
    device, own = (DEVICE, dtype) if kind == "triton" else ("cpu", torch.float32)
    table, random = make_table(dtype, width, device)
    own_bias, nothing = random(width), torch.zeros(1, max(width, 48), dtype=dtype, device=device)
    change = LowRank(nothing[:, :48].contiguous(), nothing[:, :width].contiguous(), 1, None, own_bias)
    table.put(4, change, table.wholes[4])
    x, bias, out = (random(*size).to(own) for size in ((150, 64), (width,), (150, width)))
    x, slots = x[:, :48], torch.arange(150, dtype=torch.int32, device=device) * 7 % 6
    for addend in bias, None:
        found = run(tables, kind, dtype, table, x, out, slots, addend)
        wanted = out.double()
        for slot, whole in table.wholes.items():
            product = x[slots == slot].double() @ whole.double().T
            product += own_bias.double() if slot == 4 else 0.0
            wanted[slots == slot] = product if addend is None else product + addend.double()
        small = 1e-4 if own == torch.float32 else 2e-2
        torch.testing.assert_close(found.double(), wanted, rtol=small, atol=small)
        others = (slots != 1) & (slots != 4)
        assert torch.equal(found[others], out[others])
        alone = run(tables, kind, dtype, table, x[13:14], out[13:14], slots[13:14].clone(), addend)
        assert slots[13] == 1
        torch.testing.assert_close(alone[0], found[13], rtol=0, atol=1e-4 if kind == "ref" else 0)


@pytest.mark.parametrize(("kind", "dtype"), CASES, ids=str)
def test_lookups(tables, kind, dtype):
    """Of a factor that embeddings have, too; the last slot's adapter goes, another takes its place."""
    device, kept = (DEVICE, dtype) if kind == "triton" else ("cpu", torch.float32)
    table, random = make_table(dtype, IDS, device)
    out, ids = random(90, 48).to(kept), torch.arange(90, device=device) * 11 % IDS
    slots = torch.arange(90, dtype=torch.int32, device=device) * 5 % 6
    ids[::7] = -1
    for _ in range(2):
        found, wanted = out.clone(), out.double()
        tables[kind].adapters.change_lookup(ids, found, slots, table, 3.0)
        for slot, whole in table.wholes.items():
            own = (slots == slot) & (ids >= 0)
            wanted[own] = whole.double()[ids[own]] * 3.0
        for slot, (down, up, *_) in table.kept.items():
            own = (slots == slot) & (ids >= 0)
            wanted[own] += down.double()[ids[own]] @ up.double() * 3.0
        small = 1e-4 if kept == torch.float32 else 2e-2
        torch.testing.assert_close(found.double(), wanted, rtol=small, atol=5 * small)
        assert torch.equal(found[slots % 5 == 0], out[slots % 5 == 0]) and not torch.equal(found, out)
        table.put(4, LowRank(random(IDS, 7).to(dtype), random(7, 48).to(dtype)))
        table.put(3, None)
