"""What is kept per slot: numbers, sparse lists, growing token tables; and `Batch`, the rows of one call.

A slot belongs to one request at a time. Everything here is replaced when a slot changes hands, never merged.
Called by the sampler and its processors. Host arrays say which rows; values stay on the device, and go there
in copies that neither side waits for.
"""

from dataclasses import dataclass

import numpy as np
import torch

from octavo.runtime.transfer import Array, staged, to_device


@dataclass(slots=True)
class Batch:
    """Rows of the logits and whose they are; all [n] int64 on the host, distinct slots.

    positions: index of the output token to be chosen
    """

    rows: Array
    slots: Array
    positions: Array

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, mask: Array) -> "Batch":
        """The part where `mask` ([n] bool) holds."""
        return self if mask.all() else Batch(self.rows[mask], self.slots[mask], self.positions[mask])


class SlotNumbers:
    """A row of numbers per slot, written on the host and read on the device.

    However many rows were written since the last reading, one copy of the small table brings them over.
    """

    def __init__(self, num_slots: int, num_columns: int, dtype: type, device: torch.device) -> None:
        self._host: Array = np.zeros((num_slots, num_columns), dtype)
        self._device = torch.from_numpy(self._host).to(device, copy=True)
        self._is_stale = False

    def put(self, slot: int, *numbers: float) -> None:
        """Replace the row of `slot`."""
        self._host[slot] = numbers
        self._is_stale = True

    def on_device(self) -> torch.Tensor:
        """[num_slots, num_columns]; always the same memory, so that recorded work may refer to it."""
        if self._is_stale:
            self._device.copy_(staged(self._host, self._device.device), non_blocking=True)
            self._is_stale = False
        return self._device


class SlotLists:
    """Per slot some columns (arrays of one length), gathered for a batch as flat tensors.

    The last selection is kept, because in steady decoding the same rows come again and again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._columns: dict[int, tuple[Array, ...]] = {}
        self._last: tuple[bytes, bytes] | None = None
        self._selection: tuple[torch.Tensor, ...] = ()

    def put(self, slot: int, *columns: Array) -> None:
        """Replace what `slot` holds. A column is [n], or [n, width] with -1 as filler."""
        self._columns[slot] = columns
        self._last = None

    def remove(self, slot: int) -> None:
        """Forget `slot`."""
        self._columns.pop(slot, None)
        self._last = None

    def select(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        """(rows, *columns) on the device: entry i belongs to row rows[i] of the logits."""
        key = batch.rows.tobytes(), batch.slots.tobytes()
        if key != self._last:
            held = [self._columns[slot] for slot in batch.slots.tolist()]
            rows = np.repeat(batch.rows, [len(columns[0]) for columns in held])
            joined = [_join(column) for column in zip(*held, strict=True)]
            self._selection = tuple(to_device(array, self._device) for array in (rows, *joined))
            self._last = key
        return self._selection


class TokenTable:
    """Growing lists of token ids on the device: a table row per slot that asked for one."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.ids = torch.zeros(0, 16, dtype=torch.int64, device=device)
        """[capacity, columns]; entries past a list's length are arbitrary valid ids."""
        self.row_of = np.full(num_slots, -1, dtype=np.int64)
        self.lengths = np.zeros(num_slots, dtype=np.int64)
        self._free: list[int] = []

    def add(self, slot: int, token_ids: Array) -> int:
        """Replace the list of `slot`; returns its table row."""
        if self.row_of[slot] < 0:
            if not self._free:
                self._free = list(range(len(self.ids), max(4, 2 * len(self.ids))))[::-1]
                self.ids = grown(self.ids, len(self.ids) + len(self._free), self.ids.shape[1])
            self.row_of[slot] = self._free.pop()
        row = int(self.row_of[slot])
        self._reserve(len(token_ids))
        self.ids[row, : len(token_ids)] = to_device(token_ids, self.ids.device)
        self.lengths[slot] = len(token_ids)
        return row

    def remove(self, slot: int) -> None:
        """Give the row of `slot` back; its content is overwritten by the next owner."""
        if self.row_of[slot] >= 0:
            self._free.append(int(self.row_of[slot]))
            self.row_of[slot] = -1

    def append(self, slots: Array, token_ids: torch.Tensor) -> None:
        """One more token for each slot. token_ids: [n] int64 on the device, never read by the host."""
        ends = self.lengths[slots]
        self._reserve(int(ends.max()) + 1)
        self.ids[self.rows(slots), to_device(ends, self.ids.device)] = token_ids
        self.lengths[slots] += 1

    def rows(self, slots: Array) -> torch.Tensor:
        """The table rows of `slots`, on the device."""
        return to_device(self.row_of[slots], self.ids.device)

    def _reserve(self, num_columns: int) -> None:
        if num_columns > self.ids.shape[1]:
            self.ids = grown(self.ids, len(self.ids), max(num_columns, 2 * self.ids.shape[1]))


def grown(table: torch.Tensor, num_rows: int, num_columns: int) -> torch.Tensor:
    """A copy with room for more, filled up with zeros."""
    larger = table.new_zeros(num_rows, num_columns)
    larger[: table.shape[0], : table.shape[1]] = table
    return larger


def in_vocabulary(token_ids: list[int] | Array, vocab_size: int) -> Array:
    """The ids that have a logit, ascending, each once: any other id would write into a neighbour's row."""
    ids = np.unique(np.asarray(token_ids, dtype=np.int64))
    return ids[(ids >= 0) & (ids < vocab_size)]


def _join(arrays: tuple[Array, ...]) -> Array:
    if arrays[0].ndim == 2:
        width = max(array.shape[1] for array in arrays)
        arrays = tuple(
            np.pad(array, ((0, 0), (0, width - array.shape[1])), constant_values=-1) for array in arrays
        )
    return np.concatenate(arrays)
