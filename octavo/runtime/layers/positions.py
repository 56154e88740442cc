"""What positions do to attention beside a rope: a factor on queries, chunks of the context."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from octavo.base.errors import Unsupported
from octavo.runtime.batch import ForwardBatch, GroupTables
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
    batch: ForwardBatch, group: int, size: int, block_size: int
) -> tuple[GroupTables, ForwardBatch]:
    """Return the step of a cache group in which each token sees its own chunk of `size` positions only.

    Each request is as many as its new tokens fall into chunks, whose blocks begin with those of the chunk;
    some may have no tokens. Layers share the result. Raises Unsupported.
    """
    if size % block_size:
        raise Unsupported(f"Attention in chunks of {size} tokens takes a block_size that divides them.")
    if (group, size) not in batch.shared:
        batch.shared[group, size] = _divide(batch, batch.groups[group], size, block_size)
    made: tuple[GroupTables, ForwardBatch] = batch.shared[group, size]
    return made


def _divide(
    batch: ForwardBatch, tables: GroupTables, size: int, block_size: int
) -> tuple[GroupTables, ForwardBatch]:
    """Compute on the device, for as many pieces as there may be."""
    singles, count, device = batch.num_singles, len(batch.kv_lens), batch.kv_lens.device
    longest = 1 if singles == count else batch.longest_q or len(batch.positions)
    most = (longest + size - 2) // size + 1
    requests = torch.arange(singles + (count - singles) * most, device=device)
    later = (requests - singles).clamp(min=0)
    pieces = torch.where(requests < singles, 0, later % most)
    requests = torch.where(requests < singles, requests, singles + later // most)
    ends = batch.kv_lens[requests]
    begins = ends - batch.cu_q_lens.diff()[requests]
    chunks = begins // size + pieces
    starts, stops = torch.maximum(begins, chunks * size), torch.minimum(ends, (chunks + 1) * size)
    bounds = functional.pad((stops - starts).clamp(min=0).cumsum(0), (1, 0)).int()
    columns = torch.arange(size // block_size, device=device) + (chunks * (size // block_size))[:, None]
    blocks = tables.block_tables
    own = blocks[requests[:, None], columns.clamp(max=blocks.shape[1] - 1)].contiguous()
    divided = replace(
        batch,
        cu_q_lens=bounds,
        kv_lens=(stops - chunks * size).clamp(min=1).int(),
        longest_q=min(batch.longest_q, size),
        mutual=None,
    )
    return GroupTables(own, tables.slots), divided
