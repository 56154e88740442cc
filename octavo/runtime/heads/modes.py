"""The ways to make one vector of a prompt's hidden states, by the names of sentence-transformers.

Each takes [tokens, size] float32, and how many leading tokens (of an instruction) to leave out.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor


def _weighted_mean(x: Tensor, skip: int) -> Tensor:
    """Tokens weigh as much as their place counts, from 1."""
    weights = torch.arange(skip + 1, len(x) + 1, device=x.device, dtype=x.dtype)
    return (x[skip:] * weights[:, None]).sum(0) / weights.sum().clamp(min=1e-9)


POOLS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "cls": lambda x, skip: x[min(skip, len(x) - 1)],
    "max": lambda x, skip: x[skip:].amax(0),
    "mean": lambda x, skip: x[skip:].sum(0) / max(len(x) - skip, 1e-9),
    "mean_sqrt_len_tokens": lambda x, skip: x[skip:].sum(0) / math.sqrt(max(len(x) - skip, 1e-9)),
    "weightedmean": _weighted_mean,
    "lasttoken": lambda x, skip: x[-1],
}


def _segments(reduce: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return what reduces each segment, token by token in order."""
    return lambda x, lengths: torch.segment_reduce(x, reduce, lengths=lengths, axis=0, unsafe=True)


SEGMENT_POOLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cls": lambda x, lengths: x[lengths.cumsum(0) - lengths],
    "lasttoken": lambda x, lengths: x[lengths.cumsum(0) - 1],
    "max": _segments("max"),
    "mean": _segments("mean"),
    "mean_sqrt_len_tokens": lambda x, lengths: _segments("sum")(x, lengths) / lengths.sqrt()[:, None],
}
"""The same of several prompts, one behind the other, of so many tokens [prompts] int64 each."""
