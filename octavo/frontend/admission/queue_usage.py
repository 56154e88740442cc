"""`QueueUsage`: what each front of an engine has taken of its queue; all of them see all of it.

Owned by `admission`. Where there are several fronts the rows are in a file of the mailbox that they map: each
writes its own row and adds up all, so a refusal costs neither a lock nor a message. Two fronts that look at
the same moment may both let a request in: the bound may be passed by one request per further front.
"""

import mmap
import os
from pathlib import Path
from typing import NamedTuple, Self

_FILE = "queue_usage"
_NUM_CELLS = 2
_ROW_BYTES = 8 * _NUM_CELLS


class Taken(NamedTuple):
    """Places in the queue."""

    num_sequences: int
    num_waiting_tokens: int
    """Of prompts that are not computed yet."""


class QueueUsage:
    """Rows by number of front."""

    def __init__(self, rows: bytearray | mmap.mmap, front: int) -> None:
        self._cells = memoryview(rows).cast("q")
        self._front = front

    @classmethod
    def alone(cls) -> Self:
        """Of the only front."""
        return cls(bytearray(_ROW_BYTES), 0)

    @classmethod
    def shared(cls, folder: Path, front: int, num_fronts: int = 0) -> Self:
        """Of several fronts, in `folder`. The first, number 0, makes the file and says how many they are."""
        fd = os.open(folder / _FILE, os.O_RDWR | (os.O_CREAT if num_fronts else 0), 0o600)
        try:
            if num_fronts:
                os.ftruncate(fd, num_fronts * _ROW_BYTES)
            return cls(mmap.mmap(fd, 0), front)
        finally:
            os.close(fd)

    def write(self, taken: Taken, front: int | None = None) -> None:
        """What this front has now; or another one, whose process has ended."""
        row = self._front if front is None else front
        self._cells[_NUM_CELLS * row], self._cells[_NUM_CELLS * row + 1] = taken

    def total(self) -> Taken:
        """What all have together."""
        cells = self._cells.tolist()
        return Taken(sum(cells[::_NUM_CELLS]), sum(cells[1::_NUM_CELLS]))
