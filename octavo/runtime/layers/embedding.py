"""Ranks split token embedding and language model head over the vocabulary; positions they keep whole."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from octavo.runtime.kernels.sampling import Choice as Choice  # noqa: PLC0414  # for models
from octavo.runtime.kernels.sampling import Draws, Limits
from octavo.runtime.layers.build import BuildContext, Layer
from octavo.runtime.quantization.parameter import Layout, Shard

Find = Callable[[], tuple[Draws, Limits | None]]
_ALMOST_1 = 1 - 2**-40
_LEAST_PART = 1024
"""Tokens of a rank below which candidates save little: logits are gathered to draw with limits."""


class Embedding(Layer):
    """Looks up rows of a table, of which every rank keeps `shard`, by default those from `first` on."""

    def __init__(
        self, build: BuildContext, rows: int, size: int, shard: Shard | None = None, first: int = 0
    ) -> None:
        super().__init__()
        kept = shard or Shard("", rows, first, rows - first)
        self.method = self.make_matrix(build, Layout((kept,), (size,)))

    def forward(self, ids: Tensor, scale: float = 1.0) -> Tensor:
        """Return the rows of ids [T], times `scale`: [T, size]."""
        return self.method.gather(ids, scale)


class VocabEmbedding(Embedding):
    """Embeds tokens; a rank contributes zeros for the tokens of other ranks."""

    def __init__(self, build: BuildContext, vocab_size: int, size: int) -> None:
        self._shard = _split_vocab(build, vocab_size)
        super().__init__(build, vocab_size, size, self._shard)
        self._parallel, self._own_rows = build.parallel, build.kernels.linear.own_rows

    def forward(self, ids: Tensor, scale: float = 1.0) -> Tensor:
        if self._parallel.tp_size == 1:
            return self.method.gather(ids, scale)
        if self._own_rows is not None:
            own = self._own_rows(ids, self._shard.start, self._shard.size)
            return self._parallel.all_reduce(self.method.gather(own, scale))
        local = ids - self._shard.start
        foreign = (local < 0) | (local >= self._shard.size)
        rows = self.method.gather(local.masked_fill(foreign, 0), scale)
        return self._parallel.all_reduce(rows.masked_fill(foreign[:, None], 0))


class LMHead(Layer):
    """Maps hidden states to logits over the whole vocabulary; uses the matrix of `tied` if given.

    scale: factor on the logits; then, unless soft_cap is 0, they become soft_cap * tanh(logits / soft_cap)
    """

    def __init__(
        self,
        build: BuildContext,
        vocab_size: int,
        size: int,
        *,
        tied: VocabEmbedding | None = None,
        bias: bool = False,
        scale: float = 1.0,
        soft_cap: float = 0.0,
    ) -> None:
        super().__init__()
        self._parallel, self._vocab_size = build.parallel, vocab_size
        self._scale, self._soft_cap = scale, soft_cap
        self._is_product = build.parallel.tp_size == 1 and not bias and scale == 1.0 and not soft_cap
        shard = _split_vocab(build, vocab_size)
        self._start, self._kernels = shard.start, build.kernels.sampling
        self._bias = self.make_vector(build, Layout((shard,)), "bias") if bias else None
        self.method = tied.method if tied else self.make_matrix(build, Layout((shard,), (size,)))

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [rows, size] to [rows, vocab_size], gathered from all ranks. See Model.logits."""
        return self._finish(self._gather(self.method.apply(hidden, self._bias)))

    def _finish(self, logits: Tensor) -> Tensor:
        if self._scale != 1.0:
            logits = logits.float() * self._scale
        if cap := self._soft_cap:
            logits = cap * torch.tanh(logits.float() / cap)
        return logits

    def greedy(self, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
        """See Model.greedy; ranks choose among their parts, then among their choices."""
        tp = self._parallel.tp
        if tp.size == 1:
            return self.method.apply_greedy(hidden) if self._is_product else None
        return tp.choose(self._kernels.choose(self._part(hidden)), self._start) if self._has_parts else None

    def draw(self, hidden: Tensor, find: Find, *, is_cut: bool = False) -> Choice | None:
        """See Model.draw."""
        size = self._parallel.tp_size
        has_candidates = self._kernels.draw_from_parts and self._vocab_size >= _LEAST_PART * size
        if size == 1 or not self._has_parts or (is_cut and not has_candidates):
            return None
        logits, (draws, limits) = self._part(hidden), find()
        return self._draw(logits, draws) if limits is None else self._draw_cut(logits, draws, limits)

    def _draw_cut(self, logits: Tensor, draws: Draws, limits: Limits) -> Choice:
        """Draw from the ranks' candidates; gather the logits of rows for which they do not suffice."""
        assert self._kernels.draw_from_parts is not None
        is_cut = limits.cuts & (draws.temperature > 0)
        whole, cut = torch.nonzero(~is_cut)[:, 0], torch.nonzero(is_cut)[:, 0]
        ids, tops = whole.new_empty(len(logits)), torch.empty(len(logits), device=logits.device)
        if len(whole):
            ids[whole], tops[whole] = self._draw(logits[whole], draws.at(whole))
        if len(cut):
            given = logits[cut], self._start, draws.noise[cut], limits.at(cut), self._parallel.all_gather
            (ids[cut], tops[cut]), is_certain = self._kernels.draw_from_parts(*given)
            if len(rest := cut[~is_certain]):
                everything = self._gather(logits[rest])
                ids[rest], tops[rest] = self._kernels.choose(everything, draws.at(rest), limits.at(rest))
        return Choice(ids, tops)

    def _draw(self, logits: Tensor, draws: Draws) -> Choice:
        """Draw from whole distributions: the rank whose part holds the noise draws."""
        tp, (temperature, noise) = self._parallel.tp, draws
        degrees, wide = temperature.where(temperature > 0, 1.0), logits.float()
        maxima = wide.amax(1)
        sums = ((wide - maxima[:, None]) / degrees[:, None].float()).exp().sum(1)
        told = tp.gather_rows(torch.stack([maxima, sums], 1)).view(tp.size, -1, 2)
        tops, sums = told[..., 0], told[..., 1]
        weights = sums.double() * ((tops - tops.amax(0)).double() / degrees).exp()
        ends = weights.cumsum(0)
        target = noise * ends[-1]
        own = (target - ends[tp.rank] + weights[tp.rank]) / weights[tp.rank]
        found = self._kernels.choose(logits, Draws(temperature, own.clamp(0, _ALMOST_1)))
        owner = (ends <= target).sum(0).clamp(max=tp.size - 1)
        owner = owner.where(temperature > 0, (tops == tops.amax(0)).int().argmax(0))
        return Choice(
            tp.gather_rows(found.token_ids + self._start).view(tp.size, -1).gather(0, owner[None])[0],
            tops.amax(0),
        )

    @property
    def _has_parts(self) -> bool:
        """Return True if every rank has a part of the vocabulary."""
        size = self._parallel.tp_size
        return (size - 1) * _rows_per_rank(self._vocab_size, size) < self._vocab_size

    def _part(self, hidden: Tensor) -> Tensor:
        return self._finish(self.method.apply(hidden, self._bias))

    def _gather(self, logits: Tensor) -> Tensor:
        if self._parallel.tp_size == 1:
            return logits
        width = _rows_per_rank(self._vocab_size, self._parallel.tp_size)
        padded = functional.pad(logits, (0, width - logits.shape[-1]))
        return self._parallel.all_gather(padded)[:, : self._vocab_size]


def _rows_per_rank(vocab_size: int, tp_size: int) -> int:
    return -(-vocab_size // tp_size)


def _split_vocab(build: BuildContext, size: int) -> Shard:
    """Return this rank's rows: equal numbers, except that the last ranks may be short of some."""
    rows = _rows_per_rank(size, build.parallel.tp_size)
    start = min(build.parallel.tp_rank * rows, size)
    return Shard("", size, start, min(rows, size - start))
