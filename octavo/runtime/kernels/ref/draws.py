"""Twins of the kernels that choose tokens."""

import torch
from torch import Tensor

from octavo.runtime.kernels.table import Cut


def draw(
    logits: Tensor, temperature: Tensor | None = None, noise: Tensor | None = None, cut: Cut | None = None
) -> tuple[Tensor, Tensor]:
    """See table.Draw."""
    wide = logits.double()
    peaks = wide.amax(dim=1)
    likeliest = (wide == peaks[:, None]).int().argmax(dim=1)
    if temperature is None or noise is None:
        return likeliest, peaks.float()
    if cut is not None:
        ids = torch.arange(logits.shape[1], device=logits.device)
        lowest, last_id = cut.values[:, None], cut.ids[:, None]
        wide = wide.masked_fill((wide < lowest) | ((wide == lowest) & (ids > last_id)), float("-inf"))
    degrees = temperature.where(temperature > 0, 1.0)[:, None]
    ends = ((wide - peaks[:, None]) / degrees).exp().cumsum(dim=1)
    drawn = torch.searchsorted(ends, noise[:, None] * ends[:, -1:], right=True)[:, 0]
    return drawn.clamp(max=logits.shape[1] - 1).where(temperature > 0, likeliest), peaks.float()
