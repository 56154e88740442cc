"""`Rejection` keeps drafts as often as the distributions allow, which is more often than by equality.

Asked by the sampler for rows behind which a draft stands that was drawn. It is given up at random, by how
much likelier the drafter found it than the model does; then a token is drawn from what drafts leave out. So
tokens are distributed as without drafts. They are the same tokens where both distributions are equal.
Sources: https://arxiv.org/abs/2211.17192 (standard), https://arxiv.org/abs/2403.10444 (block)
"""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from octavo.runtime.sampling.rows import Batch
from octavo.runtime.transfer import Array, send

_KEEP, _REPLACE = 1 << 60, 1 << 61
"""Added to positions: streams of noise beside that of the tokens."""
_BLOCK = 1 << 24
"""The noise of a block's drafts decides about those before them, so that of the next block must be other."""


class Source(Protocol):
    """What the sampler draws from, and by."""

    def probabilities(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the distributions of these rows of the logits, [len(batch), vocab_size] float32."""

    def noise(self, rows: Array, positions: Array) -> Tensor:
        """Return a number in [0, 1) for each, [n] float64."""

    def draw(self, logits: Tensor, noise: Tensor) -> Tensor:
        """Return a token of each row, [n] int64."""


class Rejection:
    """Knows what the drafts of the last step were drawn from."""

    def __init__(self, *, in_blocks: bool) -> None:
        """in_blocks: all drafts of a request are decided on together, and more of them are kept."""
        self._in_blocks = in_blocks
        self.begin()

    def begin(self) -> None:
        """Forget the drafts of the step before."""
        self._odds: list[Tensor] = []
        self._index: dict[tuple[int, int], int] = {}
        """By row and output position: the row of all `_odds`."""
        self._firsts: dict[int, int] = {}
        """By row, the output position of its first draft."""

    def keep(self, source: Source, logits: Tensor, rows: Array, positions: Array) -> Array:
        """Keep what drafts at these output positions are drawn from; return the positions of their noise."""
        batch = Batch(np.arange(len(rows)), rows, positions)
        for row, position in zip(rows.tolist(), positions.tolist(), strict=True):
            self._index[row, position] = len(self._index)
            self._firsts.setdefault(row, position)
        self._odds.append(source.probabilities(logits, batch))
        noisy: Array = positions + self._offsets(rows)
        return noisy

    def find(self, batch: Batch, drafts: Array) -> Batch:
        """Return the part of the batch behind which a draft stands that was drawn; drafts: [n], -1 = none."""
        keys = zip(batch.rows.tolist(), batch.positions.tolist(), strict=True)
        return batch.where(np.array([key in self._index for key in keys]) & (drafts >= 0))

    def decide(self, source: Source, wanted: Tensor, batch: Batch, drafts: Array) -> Tensor:
        """Return the draft of each row found, or what replaces it: [m] int64; -1 behind the end of a block.

        wanted: [m, vocab_size], what the model draws from; the rows of a request stand in order
        """
        keys = zip(batch.rows.tolist(), batch.positions.tolist(), strict=True)
        is_first = np.append(True, batch.rows[1:] != batch.rows[:-1]) if self._in_blocks else batch.rows >= 0
        owners, places = is_first.cumsum() - 1, np.arange(len(batch))
        places -= places[is_first][owners]
        arrays = [np.array([self._index[key] for key in keys]), drafts, owners, places]
        index, drafted, owner, place = send(arrays, wanted.device)
        odds, offsets = torch.cat(self._odds)[index], self._offsets(batch.rows)
        ratio = (wanted.gather(1, drafted[:, None]) / odds.gather(1, drafted[:, None]))[:, 0]
        share, following = torch.ones_like(ratio), torch.arange(1, len(batch) + 1, device=wanted.device)
        for number in range(1, int(places.max()) + 1):
            used = (share * ratio).clamp(max=1).roll(1)
            share = torch.where(place == number, used, share)
        left = (wanted * share[:, None] - odds).clamp(min=0)
        total = left.sum(dim=1)
        chance = torch.where(share < 1, total / (total + 1 - share), 1.0)
        is_last = torch.cat([owner[1:] != owner[:-1], owner.new_ones(1, dtype=torch.bool)])
        chance = torch.where(is_last, share * ratio, chance[following.clamp(max=len(batch) - 1)])
        is_kept = source.noise(batch.rows, batch.positions + offsets + _KEEP) < chance
        count = torch.zeros_like(owner).scatter_reduce_(0, owner, (place + 1) * is_kept, "amax")[owner]
        left = torch.where(total[:, None] > 0, left, wanted)
        others = source.draw(left.log(), source.noise(batch.rows, batch.positions + offsets + _REPLACE))
        return torch.where(place < count, drafted, torch.where(place == count, others, -1))

    def _offsets(self, rows: Array) -> Array:
        if not self._in_blocks:
            return np.zeros_like(rows)
        return np.array([self._firsts[row] for row in rows.tolist()], np.int64) * _BLOCK
