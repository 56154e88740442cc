"""What is kept per row of the batch: numbers, lists, growing token tables; and `Batch`, the rows of one call.

A row belongs to one request at a time. Everything here is replaced when a row changes hands, never merged.
Called by the sampler and its processors. Host arrays say which rows; values stay on the device, and go there
in copies that neither side waits for.
"""

from dataclasses import dataclass

import numpy as np
import torch

from octavo.runtime.transfer import Array, send, staged, to_device


@dataclass(slots=True)
class Batch:
    """Rows of the logits, and the requests' rows in the batch; all [n] int64 on the host, each distinct.

    positions: index of the output token to be chosen
    """

    logit_rows: Array
    rows: Array
    positions: Array

    def __len__(self) -> int:
        return len(self.logit_rows)

    def where(self, mask: Array) -> "Batch":
        """Return the part where `mask` ([n] bool) holds."""
        return self if mask.all() else Batch(self.logit_rows[mask], self.rows[mask], self.positions[mask])


class RowNumbers:
    """Some numbers per row, written on the host and read on the device.

    However many rows were written since the last reading, one copy of the small table brings them over.
    """

    def __init__(self, num_rows: int, num_columns: int, dtype: type, device: torch.device) -> None:
        self._host: Array = np.zeros((num_rows, num_columns), dtype)
        self._device = torch.from_numpy(self._host).to(device, copy=True)
        self._is_stale = False

    def put(self, row: int, *numbers: float) -> None:
        """Replace the numbers of `row`."""
        self._host[row] = numbers
        self._is_stale = True

    def on_device(self) -> torch.Tensor:
        """Return [num_rows, num_columns]; always the same memory, so that recorded work may refer to it."""
        if self._is_stale:
            self._device.copy_(staged(self._host, self._device.device), non_blocking=True)
            self._is_stale = False
        return self._device


class RowLists:
    """Per row some columns (arrays of one length), gathered for a batch as flat tensors.

    The last selection is kept, because in steady decoding the same rows come again and again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._columns: dict[int, tuple[Array, ...]] = {}
        self._last: tuple[bytes, bytes] | None = None
        self._selection: tuple[torch.Tensor, ...] = ()

    def put(self, row: int, *columns: Array) -> None:
        """Replace what `row` holds. A column is [n], or [n, width] with -1 as filler."""
        self._columns[row] = columns
        self._last = None

    def remove(self, row: int) -> None:
        """Forget `row`."""
        self._columns.pop(row, None)
        self._last = None

    def select(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Return (logit_rows, *columns) on the device: entry i belongs to row logit_rows[i] of the logits."""
        key = batch.logit_rows.tobytes(), batch.rows.tobytes()
        if key != self._last:
            held = [self._columns[row] for row in batch.rows.tolist()]
            logit_rows = np.repeat(batch.logit_rows, [len(columns[0]) for columns in held])
            joined = [_join(column) for column in zip(*held, strict=True)]
            self._selection = tuple(to_device(array, self._device) for array in (logit_rows, *joined))
            self._last = key
        return self._selection


class TokenTable:
    """Growing lists of token ids on the device: a row of the table per row of the batch that asks for one."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.ids = torch.zeros(0, 16, dtype=torch.int64, device=device)
        """[capacity, columns]; entries past a list's length are arbitrary valid ids."""
        self.row_of = np.full(num_rows, -1, dtype=np.int64)
        self.lengths = np.zeros(num_rows, dtype=np.int64)
        self._free: list[int] = []

    def add(self, row: int, token_ids: Array) -> int:
        """Replace the list of `row`; returns its table row."""
        table_row = self.claim(row, len(token_ids))
        self.ids[table_row, : len(token_ids)] = to_device(token_ids, self.ids.device)
        return table_row

    def claim(self, row: int, length: int) -> int:
        """Give `row` a list of this length, to be written by the caller; returns its table row."""
        if self.row_of[row] < 0:
            if not self._free:
                self._free = list(range(len(self.ids), max(4, 2 * len(self.ids))))[::-1]
                self.ids = grown(self.ids, len(self.ids) + len(self._free), self.ids.shape[1])
            self.row_of[row] = self._free.pop()
        self.reserve(length)
        self.lengths[row] = length
        return int(self.row_of[row])

    def remove(self, row: int) -> None:
        """Give the table row of `row` back; its content is overwritten by the next owner."""
        if self.row_of[row] >= 0:
            self._free.append(int(self.row_of[row]))
            self.row_of[row] = -1

    def append(self, rows: Array, token_ids: torch.Tensor) -> None:
        """Append one more token for each row. token_ids: [n] int64 on the device, never read by the host."""
        ends = self.lengths[rows]
        self.reserve(int(ends.max()) + 1)
        table_rows, columns = send([self.row_of[rows], ends], self.ids.device)
        self.ids[table_rows, columns] = token_ids
        self.lengths[rows] += 1

    def reserve(self, num_columns: int) -> None:
        """Have room for lists of this length."""
        if num_columns > self.ids.shape[1]:
            self.ids = grown(self.ids, len(self.ids), max(num_columns, 2 * self.ids.shape[1]))


def grown(table: torch.Tensor, num_rows: int, num_columns: int) -> torch.Tensor:
    """Return a copy with room for more, filled up with zeros."""
    larger = table.new_zeros(num_rows, num_columns)
    larger[: table.shape[0], : table.shape[1]] = table
    return larger


def in_vocabulary(token_ids: list[int] | Array, vocab_size: int) -> Array:
    """Return the ids that have a logit, ascending, each once: others would write into a neighbour's row."""
    ids = np.sort(np.asarray(token_ids, dtype=np.int64))  # np.unique takes ten times as long
    is_new = np.append(True, ids[1:] != ids[:-1])[: len(ids)]
    return ids[is_new & (ids >= 0) & (ids < vocab_size)]


def _join(arrays: tuple[Array, ...]) -> Array:
    if arrays[0].ndim == 2:
        width = max(array.shape[1] for array in arrays)
        arrays = tuple(
            np.pad(array, ((0, 0), (0, width - array.shape[1])), constant_values=-1) for array in arrays
        )
    return np.concatenate(arrays)
