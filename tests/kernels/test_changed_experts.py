"""Experts that adapters change: compiled and in Triton, against the reference's loop over experts."""

import pytest
import torch

from octavo.runtime.kernels.adapters import ENTRY, LowRank, LowRankTable
from octavo.runtime.kernels.cpu.table import cpu_table
from octavo.runtime.kernels.experts import Changes, ExpertForm, Routing, Shared, Stacks
from octavo.runtime.kernels.linear import Packed
from octavo.runtime.kernels.ref.table import ref_table
from tests.kernel_cases import make_blocks

E, H, I = 5, 48, 32  # noqa: E741  # as in kernels/experts.py
RANKS = (0, 3, 8, 0, 33)
"""By slot; 0 = no changes of experts."""


def fast(name):
    if name == "cpu":
        return cpu_table(2), "cpu"
    from tests.triton_here import DEVICE  # skips where there is no Triton

    # isort: split
    from octavo.runtime.kernels.triton.table import cuda_table

    return cuda_table(), DEVICE


def table_of(inputs, bounds, seed, device):
    """Slots of those ranks, in one part or two."""
    random = torch.Generator().manual_seed(seed)
    entries = torch.zeros(len(RANKS) * E, ENTRY, dtype=torch.int64, device=device)
    on_device = torch.tensor(bounds, dtype=torch.int32, device=device)
    table = LowRankTable(entries, on_device, torch.float32, bounds, 40, E)
    for slot, rank in enumerate(RANKS):
        parts = len(bounds) - 1 if slot % 2 else 1
        down = torch.randn(E, parts * rank, inputs, generator=random)
        up = 0.3 * torch.randn(E, rank, bounds[-1], generator=random)
        table.put(slot, LowRank(down, up, parts).on(torch.device(device)) if rank else None)
    return table


def make_call(kernels, slots, device):
    """Tokens, one for each slot given, three experts of each, all matrices, and what is changed of them."""
    tokens, generator = len(slots), torch.Generator().manual_seed(len(slots))
    shapes = ((I, H), (I, H), (H, I))
    blocks = (make_blocks("F32", E * n, k, i).view(E, n, -1).to(device) for i, (n, k) in enumerate(shapes))
    ids = torch.rand(tokens, E, generator=generator).argsort(1)[:, :3].int()
    routing = Routing(ids.to(device), torch.rand(tokens, 3, generator=generator).to(device))
    tables = table_of(H, (0, I, 2 * I), 1, device), table_of(I, (0, H), 2, device)
    x, stacks = torch.randn(tokens, H, generator=generator), Stacks(*(Packed(part, "F32") for part in blocks))
    return x.to(device), routing, stacks, Changes(slots, *tables, kernels.adapters)


FORMS = {"silu": {}, "weighed": {"activation": "gelu", "weighs_inputs": True}, "gpt-oss": {"limit": 0.7}}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [1, 9, 90])
@pytest.mark.parametrize("name", ["cpu", "triton"])
def test_fast_is_the_reference(name, tokens, form):
    """A token has the same bits in any company, and one without changes those that it has with none about."""
    (kernels, device), ref = fast(name), ref_table()
    slots = ((torch.arange(tokens) + 1) % 5).int().to(device)
    x, routing, stacks, changes = make_call(kernels, slots, device)
    how, shared = ExpertForm(**FORMS[form]), Shared(torch.randn(tokens, H).to(device))
    if form == "gpt-oss":
        how = how._replace(up_bias=torch.randn(E, 2 * I).to(device), down_bias=torch.randn(E, H).to(device))

    def compute(table, changes):
        return table.experts.block_experts(x, routing, stacks, how._replace(changes=changes), shared)

    wanted, found = compute(ref, changes._replace(kernels=ref.adapters)), compute(kernels, changes)
    assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()
    plain, is_plain = compute(kernels, None), (slots == 0) | (slots == 3)
    assert torch.equal(found[is_plain], plain[is_plain])
    assert (found - plain)[~is_plain].abs().amax(1).min() > 1e-3
    alone = compute(kernels, changes._replace(slots=torch.where(slots == 1, slots, 0)))
    assert torch.equal(alone[slots == 1], found[slots == 1])
