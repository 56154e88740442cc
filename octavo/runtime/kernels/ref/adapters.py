"""Reference of low-rank changes."""

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
