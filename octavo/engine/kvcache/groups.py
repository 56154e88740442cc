"""`CacheGroup`: what a kind of attention layer needs of a block table, as arithmetic on positions.

Used by the manager; owns nothing. Full attention is a window without end.

    positions  0 ......... first_kept ... first_needed ........ num_computed ........ end of the step
    blocks     freed: null | kept for a sibling | read by the step's first query | written by the step
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from math import gcd

from octavo.engine.kvcache.block_pool import BlockKey
from octavo.messages.kv import CachePlan, CrossKV, StateKV

_ENDLESS = sys.maxsize


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One block table per request; `window` positions are seen by a query, its own included."""

    index: int
    block_size: int
    window: int
    digests_per_block: int = 1
    """Of a request's hash chain, which has one wherever a block of any group may end."""
    keeps_states: bool = False
    """A block has one state, that of its last computed token."""
    num_fixed: int = 0
    """Blocks of a request from its first step to its last, whatever its tokens are; they hold its source."""

    @classmethod
    def all_of(cls, plan: CachePlan) -> list["CacheGroup"]:
        """Return the groups of a planned cache."""
        sizes = plan.block_sizes
        windows = [group.spec.sliding_window or _ENDLESS for group in plan.groups]
        states = [isinstance(group.spec, StateKV) for group in plan.groups]
        sources = [group.spec.num_tokens if isinstance(group.spec, CrossKV) else 0 for group in plan.groups]
        return [
            cls(i, size, windows[i], size // gcd(*sizes), states[i], -(-sources[i] // size))
            for i, size in enumerate(sizes)
        ]

    @property
    def is_full(self) -> bool:
        """Return True if no block ever leaves the window."""
        return self.window == _ENDLESS

    def first_needed(self, num_computed: int) -> int:
        """Index of the first block that the query at position `num_computed` reads."""
        return max(0, num_computed - self.window + 1) // self.block_size

    def first_kept(self, num_computed: int) -> int:
        """Index of the first block not to be freed when positions below `num_computed` have been scheduled.

        One position more than the next query sees: a sibling that forks goes back to the last prompt token.
        """
        return max(0, num_computed - self.window) // self.block_size

    def num_drafts(self, num_computed: int, num_unsure: int) -> int:
        """Return how many drafts may follow: where states are kept, short of the end of a block.

        However many of the unsure tokens came true. So what a block keeps in the end is never behind a draft.
        """
        room = self.block_size - 2 - num_computed % self.block_size - num_unsure
        return max(0, room) if self.keeps_states else _ENDLESS

    def num_blocks(self, num_tokens: int) -> int:
        """Return how many blocks hold the first `num_tokens` tokens, the last one perhaps in part."""
        return self.num_fixed or -(-num_tokens // self.block_size)

    def peak_blocks(self, num_tokens: int, max_chunk: int) -> int:
        """Return the most blocks in use while `num_tokens` are computed from nothing, in chunks ≤ max_chunk.

        A step holds the positions kept behind it and its own chunk, wherever the block borders fall.
        """
        whole = self.num_blocks(num_tokens)
        if self.is_full:
            return whole
        span = self.window + min(max_chunk, num_tokens)
        return min(whole, (span + self.block_size - 2) // self.block_size + 1)

    def key(self, digests: list[bytes], index: int) -> BlockKey:
        """Return the name of block `index`'s content: the digest of all tokens up to its end."""
        return digests[(index + 1) * self.digests_per_block - 1], self.index

    def keys(self, digests: list[bytes], first: int, end: int) -> list[BlockKey]:
        """Those of blocks first … end - 1, as far as they are named yet; those of sources never are."""
        if self.num_fixed:
            return []
        stride = self.digests_per_block
        return [(digest, self.index) for digest in digests[(first + 1) * stride - 1 : end * stride : stride]]

    def longest_hit(
        self, digests: list[bytes], is_known: Callable[[BlockKey], bool], limit: int, unit: int
    ) -> int:
        """Return how many leading tokens, at most `limit`, need not be computed: a multiple of `unit`.

        limit: a multiple of `unit`, too, which is one of the group's block size
        """
        size = self.block_size
        if self.num_fixed:
            return limit
        if self.is_full:
            blocks = range(limit // size)
            missing = next((i for i in blocks if not is_known(self.key(digests, i))), None)
            return limit if missing is None else missing * size // unit * unit
        end = limit
        index = limit // size - 1
        while index >= self.first_needed(end):
            if not is_known(self.key(digests, index)):
                end = index * size // unit * unit
                index = end // size
            index -= 1
        return end
