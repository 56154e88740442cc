"""Logprobs of chosen tokens and of the most likely ones beside them, for outputs and for prompts.

Called by the sampler, and by the runner for prompts (`score_tokens`). Never changes what is sampled.
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple

import torch

from octavo.messages.request import TokenLogprobs
from octavo.runtime.kernels.choice import top_candidates
from octavo.runtime.transfer import Array

LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
"""raw = as the model gives them, processed = as they are sampled from; logits = without normalising."""

WHOLE_VOCABULARY = -1


class Scores(NamedTuple):
    """Rows with equally many entries: token_ids, values, ranks are [n, 1 + k], the chosen token first."""

    token_ids: torch.Tensor
    values: torch.Tensor
    ranks: torch.Tensor


def score(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    num_top: int,
    normalise: bool,
    listed_ids: torch.Tensor | None = None,
) -> Scores:
    """Score the chosen tokens and the `num_top` others, or those listed instead.

    logits:        [n, vocab_size] float32, overwritten when `normalise`d
    token_ids:     [n] int64
    num_top: -1 = the whole vocabulary
    listed_ids:    [n, k] int64
    A token's rank is 1 + the number of larger values.
    """
    vocab_size = logits.shape[1]
    values = torch.log_softmax(logits, dim=1, out=logits) if normalise else logits
    size = vocab_size if num_top == WHOLE_VOCABULARY else min(num_top, vocab_size)
    chosen = values.gather(1, token_ids[:, None])
    rank = 1 + (values > chosen).sum(dim=1, keepdim=True)
    if listed_ids is not None:
        ids, others = listed_ids, values.gather(1, listed_ids)
        ascending = values.sort(dim=1).values
        ranks = 1 + vocab_size - torch.searchsorted(ascending, others, right=True)
    elif size == 0:
        return Scores(token_ids[:, None], chosen, rank)
    else:
        others, ids = top_candidates(values, size)
        ranks = torch.arange(1, size + 1, device=logits.device).expand(len(logits), -1)
    return Scores(
        torch.cat([token_ids[:, None], ids], dim=1),
        torch.cat([chosen, others], dim=1),
        torch.cat([rank, ranks], dim=1),
    )


def entries(scores: Iterable[torch.Tensor | Array]) -> list[TokenLogprobs]:
    """Return an entry for each row of `Scores`, wherever they are; waits for the device."""
    columns = (column.tolist() for column in scores)
    return [TokenLogprobs(*row) for row in zip(*columns, strict=True)]


def score_tokens(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int, mode: str
) -> list[TokenLogprobs]:
    """Score prompt tokens; nothing processes prompts, so raw and processed are the same.

    logits: [n, vocab_size], row i predicts token_ids[i], kept; token_ids: [n] int64
    """
    values = logits.float()
    owned = values.clone() if values is logits else values
    return entries(score(owned, token_ids, num_top, mode.endswith("logprobs")))


def score_candidates(logits: torch.Tensor, candidates: list[list[int]], mode: str) -> list[list[float]]:
    """Return the values of each row's own candidates. logits: [n, vocab_size], kept."""
    longest = max(map(len, candidates), default=0)
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in candidates], device=logits.device)
    values = logits.float()
    if mode.endswith("logprobs"):
        values = values.log_softmax(dim=1)
    scores = values.gather(1, ids).tolist()
    return [row[: len(wanted)] for row, wanted in zip(scores, candidates, strict=True)]
