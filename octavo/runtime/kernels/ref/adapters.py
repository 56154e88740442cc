"""References of what adapters change."""

from itertools import pairwise

import torch
from torch import Tensor

from octavo.runtime.kernels.adapters import LowRankTable


def add_low_rank(x: Tensor, out: Tensor, slots: Tensor, table: LowRankTable, bias: Tensor | None) -> None:
    """See adapters.AddLowRank."""
    for key in sorted({*slots.tolist()}):
        if (stack := table.kept.get(key // table.experts)) is None:
            continue
        change = stack.of(key % table.experts)
        (tokens,) = (slots == key).nonzero(as_tuple=True)
        bounds = table.kept_bounds if change.parts > 1 else (0, table.num_outputs)
        inner = (x[tokens].float() @ change.down.float().T).chunk(change.parts, -1)
        up, spans = change.up.float(), enumerate(pairwise(bounds))
        delta = torch.cat([inner[i] @ up[:, begin:end] for i, (begin, end) in spans], -1)
        total = out[tokens].float() + delta
        if change.factors is not None:
            base = 0.0 if bias is None else bias.float()
            total = (total - base) * change.factors + base
        if change.bias is not None:
            total = total + change.bias
        out[tokens] = total.to(out.dtype)


def replace(x: Tensor, out: Tensor, slots: Tensor, table: LowRankTable, bias: Tensor | None) -> None:
    """See adapters.Replace."""
    for slot, whole in table.wholes.items():
        (tokens,) = (slots == slot).nonzero(as_tuple=True)
        product, change = x[tokens].float() @ whole.float().T, table.kept.get(slot)
        product = product if bias is None else product + bias.float()
        own = change.bias if change else None
        out[tokens] = (product if own is None else product + own).to(out.dtype)


def change_lookup(ids: Tensor, out: Tensor, slots: Tensor, table: LowRankTable, scale: float) -> None:
    """See adapters.ChangeLookup."""
    for slot in (*table.wholes, *table.kept):
        (tokens,) = ((slots == slot) & (ids >= 0)).nonzero(as_tuple=True)
        if (whole := table.wholes.get(slot)) is not None:
            rows = whole[ids[tokens]].float() * scale
        else:
            down, up, *_ = table.kept[slot]
            rows = out[tokens].float() + down[ids[tokens]].float() @ up.float() * scale
        out[tokens] = rows.to(out.dtype)
