"""Logprobs of chosen tokens and of the most likely ones beside them, for outputs and for prompts.

Called by the sampler, and by the runner for prompts (`score_tokens`). Never changes what is sampled.
"""

from collections.abc import Iterable
from typing import Literal

import torch

from octavo.messages.request import TokenLogprobs
from octavo.runtime.kernels.choice import score
from octavo.runtime.kernels.sampling import Scored
from octavo.runtime.transfer import Array

LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
"""raw = as the model gives them, processed = as they are sampled from; logits = without normalising."""


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
    rows = torch.arange(len(logits), device=logits.device)
    return entries(score(logits, Scored(rows, token_ids, num_top, mode.endswith("logprobs"))))


def score_candidates(logits: torch.Tensor, candidates: list[list[int]], mode: str) -> list[list[float]]:
    """Return the values of each row's own candidates. logits: [n, vocab_size], kept."""
    longest = max(map(len, candidates), default=0)
    rows = [row + [0] * (longest - len(row)) for row in candidates]
    ids = torch.tensor(rows, dtype=torch.int64, device=logits.device)
    values = logits.float()
    if mode.endswith("logprobs"):
        values = values.log_softmax(dim=1)
    scores = values.gather(1, ids).tolist()
    return [row[: len(wanted)] for row, wanted in zip(scores, candidates, strict=True)]
