"""`TapedModel`: a model whose decoding steps on a CPU are one call of C, instead of hundreds from Python.

The worker puts it before the model where kernels can be recorded on tapes. A step of one token per request is
copied into tensors that stay where they are, padded to the next size by rows that store nothing, and
repeated from the tape of that size, which is recorded when the size is first met. All other steps, and all
steps of a model that cannot be recorded, are the model's own.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.runtime.batch import ForwardBatch, GroupTables
from octavo.runtime.kernels.table import RecordTape
from octavo.runtime.models.interface import Model

_MOST_ROWS = 128


@dataclass(slots=True)
class _Recorded:
    """repeat: computes `batch`, the rows of the static one, into `hidden`"""

    batch: ForwardBatch
    hidden: Tensor
    repeat: Callable[[], None]


class TapedModel(Model):
    """Computes what `model` computes, to the bit."""

    def __init__(self, model: Model, record: RecordTape) -> None:
        super().__init__()
        self._model, self._record = model, record
        self._is_recordable = True
        self._static: ForwardBatch | None = None
        self._recorded: dict[int, _Recorded] = {}

    @property
    def weight_bytes(self) -> int:
        """See Model.weight_bytes."""
        return self._model.weight_bytes

    def logits(self, hidden: Tensor) -> Tensor:
        """See Model.logits."""
        return self._model.logits(hidden)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """See Model.forward; the result of a decoding step is good until the next one."""
        num_rows = len(batch.kv_lens)
        may_repeat = 0 < num_rows == batch.num_singles <= _MOST_ROWS and batch.given_embeds is None
        recorded = self._recorded_for(batch, num_rows) if may_repeat and self._is_recordable else None
        if recorded is None:
            return self._model.forward(batch)
        _fill(recorded.batch, batch, num_rows)
        recorded.repeat()
        return recorded.hidden[:num_rows]

    def _recorded_for(self, batch: ForwardBatch, num_rows: int) -> _Recorded | None:
        size = _padded(num_rows)
        if size not in self._recorded:
            if self._static is None:
                self._static = _static_like(batch)
            self._record_step(size, _rows_of(self._static, size))
        return self._recorded.get(size)

    def _record_step(self, size: int, batch: ForwardBatch) -> None:
        made: list[Tensor] = []
        repeat = self._record(lambda: made.append(self._model.forward(batch)))
        self._is_recordable = repeat is not None
        if repeat is not None:
            self._recorded[size] = _Recorded(batch, made[0], repeat)


def _padded(num_rows: int) -> int:
    """Every number up to 8, then those that fill tiles of the kernels."""
    unit = 1 if num_rows <= 8 else 4 if num_rows <= 64 else 8
    return -(-num_rows // unit) * unit


def _static_like(batch: ForwardBatch) -> ForwardBatch:
    """A decoding step of the most rows, of nobody: it reads block 0 and stores nothing."""

    def rows(tensor: Tensor) -> Tensor:
        return tensor.new_zeros((_MOST_ROWS, *tensor.shape[1:]))

    tables = [GroupTables(rows(group.block_tables), rows(group.slots)) for group in batch.groups]
    return replace(
        batch,
        input_ids=rows(batch.input_ids),
        positions=rows(batch.positions),
        cu_q_lens=torch.arange(_MOST_ROWS + 1, dtype=torch.int32),
        kv_lens=rows(batch.kv_lens),
        groups=tables,
        rotations={},
    )


def _rows_of(batch: ForwardBatch, size: int) -> ForwardBatch:
    """Its first rows, in the same memory."""
    return replace(
        batch,
        input_ids=batch.input_ids[:size],
        positions=batch.positions[:size],
        cu_q_lens=batch.cu_q_lens[: size + 1],
        kv_lens=batch.kv_lens[:size],
        groups=[GroupTables(g.block_tables[:size], g.slots[:size]) for g in batch.groups],
        num_singles=size,
        rotations={},
    )


def _fill(static: ForwardBatch, batch: ForwardBatch, num_rows: int) -> None:
    """Put a step into the first rows; those behind read one slot of block 0, and store nothing."""
    static.kv_lens.fill_(1)
    for mine, given in zip(_numbers(static), _numbers(batch), strict=True):
        mine[:num_rows].copy_(given)
    for group in static.groups:
        group.block_tables[num_rows:, :1].fill_(0)
        group.slots[num_rows:].fill_(-1)


def _numbers(batch: ForwardBatch) -> list[Tensor]:
    of_groups = [tensor for group in batch.groups for tensor in (group.block_tables, group.slots)]
    return [batch.input_ids, batch.positions, batch.kv_lens, *of_groups]
