"""References of the kernels that choose tokens."""

import torch
from torch import Tensor

from octavo.runtime.kernels import sampling


def draw(
    logits: Tensor, draws: sampling.Draws | None = None, truncation: sampling.Truncation | None = None
) -> sampling.Choice:
    """See sampling.Draw."""
    wide = logits.double()
    max_logits = wide.amax(dim=1)
    greedy = (wide == max_logits[:, None]).int().argmax(dim=1)
    if draws is None:
        return sampling.Choice(greedy, max_logits.float())
    temperature, noise = draws
    if truncation is not None:
        ids = torch.arange(logits.shape[1], device=logits.device)
        lowest, last_id = truncation.values[:, None], truncation.ids[:, None]
        wide = wide.masked_fill((wide < lowest) | ((wide == lowest) & (ids > last_id)), float("-inf"))
    degrees = temperature.where(temperature > 0, 1.0)[:, None]
    ends = ((wide - max_logits[:, None]) / degrees).exp().cumsum(dim=1)
    drawn = torch.searchsorted(ends, noise[:, None] * ends[:, -1:], right=True)[:, 0]
    drawn = drawn.clamp(max=logits.shape[1] - 1)
    return sampling.Choice(drawn.where(temperature > 0, greedy), max_logits.float())


def truncate(logits: Tensor, limits: sampling.Limits) -> sampling.Truncation:
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
    return sampling.Truncation(values.float(), last_ids.int())


def forbid(logits: Tensor, rows: Tensor, numbers: Tensor, words: Tensor) -> None:
    """See sampling.Forbid."""
    ids = torch.arange(logits.shape[1], device=logits.device)
    is_allowed = (words[numbers][:, ids // 32] >> (ids % 32)) & 1 == 1
    logits[rows] = logits[rows].where(is_allowed, float("-inf"))


def widen(logits: Tensor) -> Tensor:
    """See sampling.Widen."""
    return logits.float().contiguous()


def ban(logits: Tensor, words: sampling.Words, ids: Tensor, lengths: Tensor) -> None:
    """See sampling.Ban: every word's prefix is compared with the end of its request's output, all at once."""
    rows, last, prefixes, owners, lists = words
    # [words, width]: column of the token that stands 1, 2, … places before the one to be chosen
    columns = lengths[owners][:, None] - 1 - torch.arange(prefixes.shape[1], device=logits.device)
    tokens = ids[lists[:, None], columns.clamp(min=0)]
    matches = (((tokens == prefixes) & (columns >= 0)) | (prefixes < 0)).all(dim=1)
    # Words of one row may share their last token, and only some of them match: the minimum decides.
    ceiling = torch.where(matches, float("-inf"), float("inf"))
    logits.view(-1).scatter_reduce_(0, rows * logits.shape[1] + last, ceiling, "amin")


def penalize(
    logits: Tensor, rows: Tensor, lists: sampling.TokenLists, owners: Tensor, strengths: Tensor
) -> None:
    """See sampling.Penalize. Source: vLLM's formulas; repetition as in Keskar et al., "CTRL", 2019."""
    marks = lists.counts[lists.rows]
    counts = marks % sampling.IN_PROMPT
    repetition, frequency, presence = strengths[owners, :, None].unbind(dim=1)
    values = logits[rows]
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    logits[rows] = torch.where(marks > 0, repeated, values) - frequency * counts - presence * (counts > 0)


def count(lists: sampling.TokenLists, token_ids: Tensor) -> None:
    """See sampling.Count."""
    before = lists.counts[lists.rows, token_ids]
    lists.ids[lists.rows, lists.lengths] = token_ids.where(before == 0, -1)
    lists.counts[lists.rows, token_ids] = before + 1


def score(logits: Tensor, scored: sampling.Scored) -> sampling.Scores:
    """See sampling.Score."""
    rows, token_ids, num_top, normalise, listed_ids = scored
    values = logits[rows].double()
    if normalise:
        values = values.log_softmax(dim=1)
    if listed_ids is None:
        listed_ids = values.sort(dim=1, descending=True, stable=True).indices
        listed_ids = listed_ids if num_top == sampling.WHOLE_VOCABULARY else listed_ids[:, :num_top]
        ranks = torch.arange(1, listed_ids.shape[1] + 1, device=logits.device).expand_as(listed_ids)
    else:
        ranks = 1 + (values[:, None] > values.gather(1, listed_ids)[:, :, None]).sum(dim=2)
    chosen = values.gather(1, token_ids[:, None])
    return sampling.Scores(
        torch.cat([token_ids[:, None], listed_ids], dim=1),
        torch.cat([chosen, values.gather(1, listed_ids)], dim=1).float(),
        torch.cat([1 + (values > chosen).sum(dim=1, keepdim=True), ranks], dim=1),
    )
