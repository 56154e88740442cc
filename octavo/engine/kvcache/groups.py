"""`CacheGroup`: what a kind of attention layer needs of a block table, as arithmetic on positions.

Used by the manager; owns nothing. Full attention is a window without end.

    positions  0 ......... first_kept ... first_needed ........ num_computed ........ end of the step
    blocks     freed: null | kept for a sibling | read by the step's first query | written by the step
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass

from octavo.messages.kv import KVCacheSpec

_ENDLESS = sys.maxsize


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One block table per request; `window` positions are seen by a query, its own included."""

    index: int
    block_size: int
    window: int

    @classmethod
    def from_spec(cls, index: int, spec: KVCacheSpec, block_size: int) -> "CacheGroup":
        """The group number `index` of the model's cache."""
        return cls(index, block_size, spec.sliding_window or _ENDLESS)

    @property
    def is_full(self) -> bool:
        """True when no block ever leaves the window."""
        return self.window == _ENDLESS

    def first_needed(self, num_computed: int) -> int:
        """Index of the first block that the query at position `num_computed` reads."""
        return max(0, num_computed - self.window + 1) // self.block_size

    def first_kept(self, num_computed: int) -> int:
        """Index of the first block not to be freed when positions below `num_computed` have been scheduled.

        One position more than the next query sees: a sibling that forks goes back to the last prompt token.
        """
        return max(0, num_computed - self.window) // self.block_size

    def peak_blocks(self, num_tokens: int, max_chunk: int) -> int:
        """Most blocks held at once while `num_tokens` are computed from nothing, in chunks ≤ max_chunk.

        A step holds the positions kept behind it and its own chunk, wherever the block borders fall.
        """
        whole = -(-num_tokens // self.block_size)
        if self.is_full:
            return whole
        span = self.window + min(max_chunk, num_tokens)
        return min(whole, (span + self.block_size - 2) // self.block_size + 1)

    def longest_hit(self, is_cached: Callable[[int, int], bool], limit: int) -> int:
        """Most leading blocks, at most `limit`, that need not be computed.

        is_cached: tells of (block index, group index) whether the content is in the cache
        """
        if self.is_full:
            return next((i for i in range(limit) if not is_cached(i, self.index)), limit)
        end = limit
        index = limit - 1
        while index >= self.first_needed(end * self.block_size):
            if not is_cached(index, self.index):
                end = index
            index -= 1
        return end
