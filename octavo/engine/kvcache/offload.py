"""`HostTier`: which contents of evicted blocks live on in host memory, and in which cells.

Owned by the KV cache manager. Knows contents by key and cells by number: the manager plans the copies, the
workers do them. A content never changes once it has a key; so a cell keeps it when it is copied back, and it
is not written again when the block is evicted the next time.

Preempted requests need nothing of their own: their full blocks are known, so they are kept here as soon as
somebody takes them, and found again when the request resumes. Only the partly filled last block is lost.
"""

from octavo.engine.kvcache.block_pool import BlockKey

COPIED_BYTES_PER_S = {"cpu": 1e9, "cuda": 3e10}
"""Whole blocks between cache and host. Measured: 1 to 2.7e9 on one AVX2 core, 3.5e10 on an H200 (pinned)."""
COMPUTED_BYTES_PER_S = {"cpu": 4e10, "cuda": 7e14}
"""Bytes of weights x tokens per second in large steps. Measured: 1e10 on one AVX2 core, 7e14 on an H200."""


def swapping_pays(kv_bytes_per_token: int, weight_bytes: int, device: str) -> bool:
    """Return True if copying a token's keys and values out and in takes less time than computing them.

    Both times grow with the number of tokens (attention makes computing grow faster still), so one comparison
    decides for all. Sizes are of one rank; weight_bytes = 0: not known, then it is taken to pay.
    """
    if not weight_bytes or device not in COPIED_BYTES_PER_S:
        return True
    copying_s = 2 * kv_bytes_per_token / COPIED_BYTES_PER_S[device]
    return copying_s < weight_bytes / COMPUTED_BYTES_PER_S[device]


class HostTier:
    """The contents of `num_cells` cells, the least recently used first."""

    def __init__(self, num_cells: int) -> None:
        self.num_stored = 0
        """Contents copied to a cell since the start."""
        self.num_loaded = 0
        """Contents copied back since the start."""
        self._cells: dict[BlockKey, int] = {}
        self._keys: list[BlockKey | None] = [None] * num_cells
        self._free = list(range(num_cells - 1, -1, -1))

    def find(self, key: BlockKey) -> int | None:
        """Return the cell that has this content."""
        return self._cells.get(key)

    def store(self, key: BlockKey) -> int | None:
        """Return the cell to copy this content to; None if it has one already, or gets none."""
        cell = self._cells.pop(key, None)
        if cell is not None:
            self._cells[key] = cell
            return None
        if self._free:
            cell = self._free.pop()
        elif self._cells:
            cell = self._cells.pop(next(iter(self._cells)))
        else:
            return None  # all are pinned, or there are none
        self._cells[key], self._keys[cell] = cell, key
        self.num_stored += 1
        return cell

    def pin(self, cell: int) -> BlockKey:
        """Protect a cell that is about to be read until `unpin`; returns its content."""
        key = self._keys[cell]
        assert key is not None and self._cells.get(key) == cell, f"host cell {cell} has no content"
        del self._cells[key]
        return key

    def unpin(self, cell: int) -> None:
        """Unpin a cell whose copy is planned: it is the most recently used, and may be written again."""
        key = self._keys[cell]
        assert key is not None
        self._cells[key] = cell
        self.num_loaded += 1

    def discard(self, key: BlockKey) -> None:
        """Forget a content; an unknown one is skipped."""
        cell = self._cells.pop(key, None)
        if cell is not None:
            self._keys[cell] = None
            self._free.append(cell)

    def clear(self) -> None:
        """Forget all contents."""
        for key in list(self._cells):
            self.discard(key)
