"""`BlockPool`: who owns which block of the KV cache, and which free blocks still hold known content.

Called by the KV cache manager only. Knows ids, not tokens or requests. Block 0 is the null block: it stands
in tables for blocks that nobody reads, is never owned, and doubles as the sentinel of the free list.

The free list is ordered by worth: blocks without known content first, then by time of release. A free block
that is in the prefix map can be taken back by `share`; handing it out for new content removes it from the map
first.
"""

from collections.abc import Callable

NULL_BLOCK = 0
BlockKey = tuple[bytes, int]
"""(digest of the tokens up to and including this block, cache group)."""


class BlockError(AssertionError):
    """The engine's own bookkeeping is broken: double free, use after free, handing out more than there is."""


class BlockPool:
    """Reference counts, the free list and the prefix map of `num_blocks` blocks, the null block included."""

    def __init__(
        self, num_blocks: int, on_evict: Callable[[int, BlockKey], None] = lambda block, key: None
    ) -> None:
        """on_evict: told of each known content before its block is handed out for another one."""
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self.num_free = num_blocks - 1
        self._ref_counts = [0] * num_blocks
        self._keys: list[BlockKey | None] = [None] * num_blocks
        self._by_key: dict[BlockKey, int] = {}
        # A ring through all free blocks and the null block: 0 → 1 → 2 → … → 0.
        self._next = [*range(1, num_blocks), NULL_BLOCK]
        self._previous = [num_blocks - 1, *range(num_blocks - 1)]

    @property
    def num_used(self) -> int:
        """Return how many blocks at least one table holds."""
        return self.num_blocks - 1 - self.num_free

    def ref_count(self, block: int) -> int:
        """Tables that hold `block`."""
        return self._ref_counts[block]

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks for new content; what they held is forgotten. BlockError if too many."""
        if count > self.num_free:
            raise BlockError(f"{count} blocks asked for, {self.num_free} are free")
        blocks = []
        for _ in range(count):
            block = self._next[NULL_BLOCK]
            self._unlink(block)
            key = self.forget(block)
            if key is not None:
                self._on_evict(block, key)
            self._ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def share(self, block: int) -> None:
        """Hold `block` once more; a free one must be in the prefix map (else its content is nobody's)."""
        if self._ref_counts[block] == 0:
            if self._keys[block] is None:
                raise BlockError(f"block {block} is used after it was freed")
            self._unlink(block)
        self._ref_counts[block] += 1

    def release(self, block: int) -> None:
        """Hold `block` once less. Of a chain, release the tail first: it is then reused first."""
        count = self._ref_counts[block]
        if count <= 0 or block == NULL_BLOCK:
            raise BlockError(f"block {block} is freed twice")
        self._ref_counts[block] = count - 1
        if count == 1:
            after = self._previous[NULL_BLOCK] if self._keys[block] is not None else NULL_BLOCK
            self._link(block, after)

    def find(self, key: BlockKey) -> int | None:
        """Return the block that holds this content, in use or free."""
        return self._by_key.get(key)

    def remember(self, block: int, key: BlockKey) -> None:
        """Enter a full block into the prefix map, unless another block already holds the same content."""
        if self._ref_counts[block] == 0 or self._keys[block] is not None:
            raise BlockError(f"block {block} is free or has a key already")
        if self._by_key.setdefault(key, block) == block:
            self._keys[block] = key

    def forget(self, block: int) -> BlockKey | None:
        """Remove `block` from the prefix map; returns its key there, if it has one."""
        key = self._keys[block]
        if key is not None:
            del self._by_key[key]
            self._keys[block] = None
        return key

    def forget_all(self) -> None:
        """Empty the prefix map."""
        for block in self._by_key.values():
            self._keys[block] = None
        self._by_key.clear()

    def _link(self, block: int, after: int) -> None:
        behind = self._next[after]
        self._next[after], self._previous[block] = block, after
        self._next[block], self._previous[behind] = behind, block
        self.num_free += 1

    def _unlink(self, block: int) -> None:
        before, behind = self._previous[block], self._next[block]
        self._next[before], self._previous[behind] = behind, before
        self.num_free -= 1
