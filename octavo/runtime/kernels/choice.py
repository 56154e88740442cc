"""Choosing one token per row in torch: greedy, or by inverse distribution function from one uniform number.

`choose` is the CPU's kernel; the sampler and its logprobs take `truncate` and `top_candidates` on every
device. Works on each row alone: the token of a row is bitwise the same whichever rows stand beside it.

Exactness. A row's softmax (float32, row by row) is rounded to whole units of 2**-51. Every later sum adds
integers below 2**53 in float64: it is exact, and so the same in whatever order a device adds.

Truncation (min_p, top_k, then top_p over what is left) needs the most likely tokens in order, by logit and
then by lowest id, and seldom many: a bounded number of candidates is tried first. They suffice when each kept
token is strictly likelier than the last candidate; for other rows the whole vocabulary is put in order.
top_k keeps every token that is as likely as the k-th; top_p keeps no more than it needs.
"""

import functools
from collections.abc import Callable

import numpy as np
import torch

from octavo.runtime.kernels import sampling
from octavo.runtime.kernels.ref import draws
from octavo.runtime.kernels.ref.noise import row_limits

_NUM_CANDIDATES = 128
_ROUNDED = 2.0**-20  # bounds what rounding changes, as a part: sums are of float32 exponentials
_PIECE = 2**20  # logits that are drawn from at once: what stays in a CPU's caches is twice as fast
_NEVER = float("-inf")
_GREEDY, _WHOLE = 0, 1  # the third kind is truncated


def choose(
    greedy: Callable[[torch.Tensor], sampling.Choice],
    logits: torch.Tensor,
    draws: sampling.Draws | None = None,
    limits: sampling.Limits | None = None,
) -> sampling.Choice:
    """See sampling.Choose; rows of one kind together. `greedy` chooses those of temperature 0."""
    logits = logits.float().contiguous()
    if draws is None:
        return greedy(logits)
    temperature, noise = draws
    token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    max_logits = torch.empty(len(logits), device=logits.device)
    kinds = _kinds(temperature, limits)
    for kind in set(kinds.tolist()):
        of_kind = torch.nonzero(kinds == kind)[:, 0]
        for rows in torch.split(of_kind, max(1, _PIECE // logits.shape[1])):
            part = logits if len(rows) == len(logits) else logits[rows]
            if kind == _GREEDY:
                choice = greedy(part)
            elif kind == _WHOLE or limits is None:
                choice = draw(part, temperature[rows, None], noise[rows])
            else:
                choice = draw_truncated(part, limits.at(rows).columns(), noise[rows])
            token_ids[rows], max_logits[rows] = choice
    return sampling.Choice(token_ids, max_logits)


def _kinds(temperature: torch.Tensor, limits: sampling.Limits | None) -> torch.Tensor:
    """Return how each row is chosen: from all logits, or from what the limits keep; [n] integers."""
    is_drawn = temperature > 0
    if limits is None:
        return is_drawn.int()
    return is_drawn.int() + (is_drawn & limits.cuts)


def greedy(logits: torch.Tensor) -> sampling.Choice:
    """Return the largest logit of each row; of equal ones the lowest id. logits: [n, vocab_size]"""
    num_rows, vocab_size = logits.shape
    chunks = logits.view(num_rows, _divisor(vocab_size, 64), -1)
    first = chunks.amax(dim=2).argmax(dim=1)  # amax is vectorised: four times faster than argmax over all
    max_logits, offsets = chunks[_range(num_rows, logits), first].max(dim=1)
    return sampling.Choice(first * chunks.shape[2] + offsets, max_logits)


def draw(logits: torch.Tensor, temperature: torch.Tensor, noise: torch.Tensor) -> sampling.Choice:
    """Draw from the whole vocabulary.

    logits: [n, vocab_size], overwritten; temperature: [n, 1]; noise: [n] in [0, 1)
    """
    max_logits = logits.amax(dim=1)
    weights = _weigh(logits, max_logits, temperature)
    ends = _block_ends(weights)
    return sampling.Choice(_locate(weights, ends, _targets(noise, ends[:, -1:]))[:, 0], max_logits)


def draw_truncated(logits: torch.Tensor, limits: sampling.Limits, noise: torch.Tensor) -> sampling.Choice:
    """Draw from what the limits keep. logits: [n, vocab_size], kept; limits: columns; noise: [n] in [0, 1)"""
    if logits.shape[1] < 2 * _NUM_CANDIDATES:
        return draw(truncate(logits, limits), limits.temperature, noise)
    values, ids = top_candidates(logits, _NUM_CANDIDATES)

    def measure(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        everything = _weigh(logits[rows], values[rows, 0], limits.temperature[rows])
        total = everything.sum(dim=1, keepdim=True, dtype=torch.float64)
        return everything.gather(1, ids[rows]).double(), total

    index, complete = _draw_candidate(values, limits, noise, measure)
    choice = sampling.Choice(ids.gather(1, index)[:, 0], values[:, 0])
    if not complete.all():
        rest = ~complete
        partial = limits.at(rest)
        redrawn = draw(truncate(logits[rest], partial), partial.temperature, noise[rest])
        choice.token_ids[rest] = redrawn.token_ids
    return choice


def draw_from_parts(
    logits: torch.Tensor,
    start: int,
    noise: torch.Tensor,
    limits: sampling.Limits,
    gather: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[sampling.Choice, torch.Tensor]:
    """See sampling.DrawFromParts: the parts' candidates hold those of the whole vocabulary.

    Where the candidates suffice only a sum over all tokens may be rounded otherwise. The drawn token moves up
    with top_p and with the noise; so it is certain if it is the same a little below and above both.
    """
    limits, logits = limits.columns(), logits.float()
    values, ids = top_candidates(logits, _NUM_CANDIDATES)
    sums = values.new_zeros(len(values), 1)
    alone = _has_top_p_alone(limits)
    degrees = limits.temperature.float()
    sums[alone] = ((logits[alone] - values[alone, :1]) / degrees[alone]).exp_().sum(dim=1, keepdim=True)
    told = gather(torch.cat([values, (ids + start).int().view(torch.float32), sums], dim=1))
    by_part = told.view(len(told), -1, 2 * _NUM_CANDIDATES + 1)
    values, ids, sums = torch.split(by_part, [_NUM_CANDIDATES, _NUM_CANDIDATES, 1], dim=2)
    tops, (values, order) = values[..., 0], values.flatten(1).sort(dim=1, descending=True, stable=True)
    values, order = values[:, :_NUM_CANDIDATES], order[:, :_NUM_CANDIDATES]
    totals = (sums[..., 0] * ((tops - values[:, :1]) / degrees).exp()).sum(dim=1, keepdim=True)

    def measure(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights = ((values[rows] - values[rows, :1]) / degrees[rows]).exp_().div_(totals[rows])
        return _to_units(weights).double(), limits.top_p.new_full((len(weights), 1), 2.0**51)

    found = []
    for factor in (1 - _ROUNDED, 1 + _ROUNDED):
        top_p = torch.where(limits.top_p < 1, limits.top_p * factor, limits.top_p)
        found.append(_draw_candidate(values, limits._replace(top_p=top_p), noise * factor, measure))
    (index, complete), (above, still_complete) = found
    is_certain = complete & still_complete & (index == above)[:, 0]
    token_ids = ids.flatten(1).contiguous().view(torch.int32).gather(1, order).gather(1, index)[:, 0]
    return sampling.Choice(token_ids.long(), values[:, 0]), is_certain


def truncate(logits: torch.Tensor, limits: sampling.Limits) -> torch.Tensor:
    """Return the logits, cut ones as -inf. logits: [n, vocab_size], kept; limits: columns"""
    ordered = _descending(logits)
    kept, weights = _survivors(ordered, limits)
    ends = _block_ends(weights)
    num_needed = 1 + _locate(weights, ends, (limits.top_p * ends[:, -1:]).ceil() - 1)
    num_kept = kept.sum(dim=1, keepdim=True)
    num_kept = torch.where(limits.top_p < 1, torch.minimum(num_kept, num_needed), num_kept)
    last = ordered.gather(1, (num_kept - 1).clamp(min=0))
    num_above = (ordered > last).sum(dim=1, keepdim=True)
    tied = logits == last
    cut = (logits < last) | (tied & (tied.cumsum(dim=1, dtype=torch.int32) > num_kept - num_above))
    return logits.masked_fill(cut, _NEVER)


def top_candidates(logits: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `size` largest logits of each row, equal ones by id: values and ids, [n, size].

    Of several tokens equal to the last one any may be taken. The vocabulary is cut into interleaved blocks;
    the `size` blocks with the largest maxima hold the `size` largest logits, so only they are searched.
    """
    num_rows, vocab_size = logits.shape
    if size == vocab_size:
        values, ids = torch.sort(logits, dim=1, descending=True, stable=True)
        return values, ids
    per_block = _divisor(vocab_size, 32)
    num_blocks = vocab_size // per_block
    if per_block > 1 and size * 2 <= num_blocks:
        maxima = logits.view(num_rows, per_block, num_blocks).amax(dim=1)
        best = maxima.topk(size, dim=1, sorted=False).indices
        offsets = torch.arange(0, vocab_size, num_blocks, device=logits.device)
        searched = (best[:, None, :] + offsets[:, None]).flatten(1)  # [n, per_block * size] ids
        ids = searched.gather(1, logits.gather(1, searched).topk(size, dim=1, sorted=False).indices)
    else:
        ids = logits.topk(size, dim=1, sorted=False).indices
    ids = ids.sort(dim=1).values
    values, order = torch.sort(logits.gather(1, ids), dim=1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _draw_candidate(
    values: torch.Tensor,
    limits: sampling.Limits,
    noise: torch.Tensor,
    measure: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the place of the drawn candidate, [n, 1], and if no token outside is kept, [n].

    measure: of rows [n] bool, weighs the candidates beside the whole vocabulary, and this: units
    """
    kept, units = _survivors(values, limits)
    weights = units.double()
    total = weights.sum(dim=1, keepdim=True)
    inside = _all_above_last(values, kept)
    # Where only top_p cuts, candidates are measured against the whole vocabulary.
    measured = ~inside & _has_top_p_alone(limits)
    if measured.any():
        weights[measured], total[measured] = measure(measured)
    kept &= (limits.top_p >= 1) | (weights.cumsum(dim=1) - weights < limits.top_p * total)
    ends = torch.where(kept, weights, 0.0).cumsum(dim=1)
    complete = (inside | measured) & _all_above_last(values, kept)
    return _first_above(ends, _targets(noise, ends[:, -1:])), complete


def _has_top_p_alone(limits: sampling.Limits) -> torch.Tensor:
    return ((limits.top_k < 1) & (limits.min_p == 0))[:, 0]


def _survivors(ordered: torch.Tensor, limits: sampling.Limits) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what min_p and top_k keep of logits in descending order, and the weights of those: [n, size]."""
    scaled = (ordered - ordered[:, :1]) / limits.temperature.float()
    kept = (scaled > _NEVER) & (scaled >= limits.min_p.log().float())
    kth = ordered.gather(1, (limits.top_k.long() - 1).clamp(0, ordered.shape[1] - 1))
    kept &= (limits.top_k < 1) | (ordered >= kth)
    return kept, _to_units(torch.softmax(scaled.masked_fill_(~kept, _NEVER), dim=1))


def _all_above_last(values: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    return ~(kept & (values == values[:, -1:])).any(dim=1)


def _descending(logits: torch.Tensor) -> torch.Tensor:
    """Return each row's logits in order. NumPy's vectorised sort is 15 times faster than torch's."""
    if logits.device.type == "cpu":
        return torch.from_numpy(np.sort(logits.numpy(), axis=1)).flip(1)
    return torch.sort(logits, dim=1, descending=True).values


def _weigh(logits: torch.Tensor, max_logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Return probabilities of the whole vocabulary in units, written over the logits."""
    logits.sub_(max_logits[:, None]).div_(temperature.float())
    return _to_units(torch.softmax(logits, dim=1, out=logits))


def _to_units(probabilities: torch.Tensor) -> torch.Tensor:
    """Round to units in place; a power of two times float32 is exact."""
    return probabilities.mul_(2.0**51).round_()


def _block_ends(weights: torch.Tensor) -> torch.Tensor:
    """Return running totals at the ends of equal blocks: [n, blocks] float64."""
    blocks = weights.view(len(weights), -1, _divisor(weights.shape[1], 512))
    return blocks.sum(dim=2, dtype=torch.float64).cumsum(dim=1)


def _locate(weights: torch.Tensor, ends: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return each row's first index where the running total exceeds the target, [n, 1]; ends: of blocks."""
    block = _first_above(ends, targets)
    before = torch.where(block > 0, ends.gather(1, (block - 1).clamp(min=0)), 0.0)
    blocks = weights.view(*ends.shape, -1)
    inside = blocks[_range(len(blocks), blocks), block[:, 0]].double().cumsum(dim=1)
    return block * blocks.shape[2] + _first_above(inside, targets - before)


def _targets(noise: torch.Tensor, totals: torch.Tensor) -> torch.Tensor:
    """Return a unit in [0, total) per row, [n, 1]; noise: [n] in [0, 1), totals: [n, 1]."""
    # The product may round up to the total itself.
    return torch.minimum((noise[:, None] * totals).floor(), totals - 1)


def _first_above(ends: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return, per row, the first index with ends > target, [n, 1]; any valid one for a row of NaN."""
    return torch.searchsorted(ends, targets, right=True).clamp(max=ends.shape[1] - 1)


def _range(number: int, like: torch.Tensor) -> torch.Tensor:
    return torch.arange(number, device=like.device)


@functools.cache
def _divisor(number: int, limit: int) -> int:
    """Return the largest divisor up to `limit`: rows are cut into equal parts without padding."""
    return max(part for part in range(1, limit + 1) if number % part == 0)


def penalize(
    logits: torch.Tensor,
    rows: torch.Tensor,
    lists: sampling.TokenLists,
    owners: torch.Tensor,
    strengths: torch.Tensor,
) -> None:
    """See sampling.Penalize: the work goes with the length of the requests, not with the vocabulary.

    A logit's change depends on its token's mark alone: that what follows a list names some tokens twice does
    no harm.
    """
    rows, numbers = rows[:, None], strengths[owners]
    ids = lists.ids[lists.rows, : lists.longest].clamp_(min=0)  # [n, longest]
    marks = lists.counts[lists.rows[:, None], ids]
    counts = marks % sampling.IN_PROMPT
    repetition, frequency, presence = numbers[:, :, None].unbind(dim=1)
    values = logits[rows, ids]
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where(marks > 0, repeated, values) - frequency * counts - presence * (counts > 0)
    logits[rows, ids] = values


def score(logits: torch.Tensor, scored: sampling.Scored) -> sampling.Scores:
    """See sampling.Score."""
    rows, token_ids, num_top, normalise, listed_ids = scored
    values, vocab_size = logits[rows].float(), logits.shape[1]
    if normalise:
        values = torch.log_softmax(values, dim=1, out=values)
    size = vocab_size if num_top == sampling.WHOLE_VOCABULARY else min(num_top, vocab_size)
    chosen = values.gather(1, token_ids[:, None])
    rank = 1 + (values > chosen).sum(dim=1, keepdim=True)
    if listed_ids is not None:
        ids, others = listed_ids, values.gather(1, listed_ids)
        ascending = values.sort(dim=1).values
        ranks = 1 + vocab_size - torch.searchsorted(ascending, others, right=True)
    elif size == 0:
        return sampling.Scores(token_ids[:, None], chosen, rank)
    else:
        others, ids = top_candidates(values, size)
        ranks = torch.arange(1, size + 1, device=logits.device).expand(len(rows), -1)
    return sampling.Scores(
        torch.cat([token_ids[:, None], ids], dim=1),
        torch.cat([chosen, others], dim=1),
        torch.cat([rank, ranks], dim=1),
    )


TORCH_SAMPLING = sampling.SamplingKernels(
    functools.partial(choose, greedy),
    row_limits,
    draws.widen,
    draws.forbid,
    draws.ban,
    penalize,
    draws.count,
    score,
    draw_from_parts,
)
