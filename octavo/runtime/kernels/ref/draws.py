"""References of the kernels that choose tokens."""

import torch
from torch import Tensor

from octavo.runtime.kernels.sampling import Choice, Draws, Limits, Truncation


def draw(logits: Tensor, draws: Draws | None = None, truncation: Truncation | None = None) -> Choice:
    """See sampling.Draw."""
    wide = logits.double()
    max_logits = wide.amax(dim=1)
    greedy = (wide == max_logits[:, None]).int().argmax(dim=1)
    if draws is None:
        return Choice(greedy, max_logits.float())
    temperature, noise = draws
    if truncation is not None:
        ids = torch.arange(logits.shape[1], device=logits.device)
        lowest, last_id = truncation.values[:, None], truncation.ids[:, None]
        wide = wide.masked_fill((wide < lowest) | ((wide == lowest) & (ids > last_id)), float("-inf"))
    degrees = temperature.where(temperature > 0, 1.0)[:, None]
    ends = ((wide - max_logits[:, None]) / degrees).exp().cumsum(dim=1)
    drawn = torch.searchsorted(ends, noise[:, None] * ends[:, -1:], right=True)[:, 0]
    drawn = drawn.clamp(max=logits.shape[1] - 1)
    return Choice(drawn.where(temperature > 0, greedy), max_logits.float())


def truncate(logits: Tensor, limits: Limits) -> Truncation:
    """See sampling.FindTruncation."""
    temperature, top_k, top_p, min_p = limits
    size = logits.shape[1]
    ordered, ids = logits.double().sort(dim=1, descending=True, stable=True)
    numbers = torch.where(top_k < 1, size, top_k).clamp(max=size).long()[:, None]
    degrees = temperature.where(temperature > 0, 1.0)[:, None]
    scaled = (ordered - ordered[:, :1]) / degrees
    kept = (ordered >= ordered.gather(1, numbers - 1)) & (scaled >= min_p.log()[:, None])
    weights = scaled.masked_fill(~kept, float("-inf")).softmax(dim=1)
    before = weights.cumsum(dim=1) - weights
    kept &= (top_p >= 1)[:, None] | (before < top_p[:, None])
    last = kept.sum(dim=1, keepdim=True) - 1
    values, last_ids = ordered.gather(1, last)[:, 0], ids.gather(1, last)[:, 0]
    off = (top_k < 1) & (top_p >= 1) & (min_p <= 0)
    values, last_ids = values.masked_fill(off, float("-inf")), last_ids.masked_fill(top_p >= 1, size)
    return Truncation(values.float(), last_ids.int())
