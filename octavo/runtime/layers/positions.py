"""What positions do to attention beside a rope: a factor on queries, chunks of the context."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.base.errors import Unsupported
from octavo.runtime.batch import ForwardBatch, GroupTables
from octavo.runtime.kernels.attention import CutChunks
from octavo.runtime.layers.build import BuildContext
from octavo.runtime.layers.rows import make_row_gather


@dataclass(frozen=True, kw_only=True)
class QueryScale:
    """Queries are multiplied by 1 + factor * ln(1 + floor((position + shift) / unit)).

    So attention stays as sharp in long contexts (https://arxiv.org/abs/2501.19399). longest: context
    """

    factor: float
    unit: int
    longest: int
    shift: int = 0

    def of(self, positions: Tensor) -> Tensor:
        """Return the factors of these positions, in float32."""
        return 1.0 + self.factor * torch.log1p(torch.floor((positions.float() + self.shift) / self.unit))


class QueryFactors:
    """Makes the factors of a step, which layers share. Where calls are recorded, they come from a table."""

    def __init__(self, scale: QueryScale, build: BuildContext) -> None:
        self._scale, self._table = scale, None
        if build.kernels.steps.record_calls is not None:
            self._table = scale.of(torch.arange(scale.longest))[:, None].contiguous()
        self._gather = make_row_gather(build)

    def of_step(self, batch: ForwardBatch) -> Tensor:
        """Return a factor per token, [T] float32."""
        if (made := batch.shared.get(self._scale)) is None:
            table, positions = self._table, batch.positions
            made = self._scale.of(positions) if table is None else self._gather(table, positions).view(-1)
            batch.shared[self._scale] = made
        factors: Tensor = made
        return factors


def within_chunks(
    batch: ForwardBatch, group: int, size: int, block_size: int, cut: CutChunks
) -> tuple[GroupTables, ForwardBatch]:
    """Return the step of a cache group in which each token sees its own chunk of `size` positions only.

    A request becomes a piece per chunk that may hold new tokens of it. Layers share the result. Raises
    Unsupported where a chunk is no whole number of blocks.
    """
    if size % block_size:
        raise Unsupported(f"Attention in chunks of {size} tokens takes a block_size that divides them.")
    if (made := batch.shared.get((group, size))) is None:
        tables, is_single = batch.groups[group], batch.num_singles == len(batch.kv_lens)
        longest = 1 if is_single else batch.longest_q or len(batch.positions)
        most = (longest + size - 2) // size + 1
        bounds, lens, own = cut(batch, tables.block_tables, size, size // block_size, most)
        longest = min(batch.longest_q, size)
        divided = replace(batch, cu_q_lens=bounds, kv_lens=lens, longest_q=longest, mutual=None, alike=None)
        made = batch.shared[group, size] = GroupTables(own, tables.slots), divided
    found: tuple[GroupTables, ForwardBatch] = made
    return found
