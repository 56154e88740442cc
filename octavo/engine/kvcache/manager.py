"""`KVCacheManager`: which blocks each request holds, by cache group, and which beginnings can be shared.

Called by the scheduler, which says how many tokens are to be computed; knows no requests, policies or steps.
All answers hold for steps that execute in the order in which they were scheduled: a block may be shared as
soon as the step that fills it is scheduled, and given to a new owner while an earlier step still reads it.
"""

import sys
from collections.abc import Callable, Sequence
from math import gcd, lcm
from operator import itemgetter

from octavo.engine.kvcache.block_pool import NULL_BLOCK, BlockKey, BlockPool
from octavo.engine.kvcache.groups import CacheGroup
from octavo.engine.kvcache.offload import HostTier
from octavo.engine.kvcache.prefix import HashChain
from octavo.engine.kvcache.shared import Pull, SharedTier
from octavo.engine.kvcache.table import BlockTable, Outside, SharedPrefix
from octavo.messages.kv import CachePlan
from octavo.messages.request import KVSource
from octavo.messages.step import BlockSave, Place, Tier


class KVCacheManager:
    """The tables of all running requests over one pool of blocks."""

    def __init__(self, plan: CachePlan, enable_prefix_caching: bool = True) -> None:
        self.pool = BlockPool(plan.num_blocks, on_evict=self._save)
        self.host = HostTier(plan.num_host_blocks)
        self.shared = SharedTier(plan)
        self.groups = CacheGroup.all_of(plan)
        self.hash_block_size = gcd(*plan.block_sizes) or plan.block_size
        """Tokens per digest of a hash chain: every block ends where one does."""
        self._hit_unit = lcm(*plan.block_sizes)
        """Shared beginnings are multiples of it: they end with a whole block in every group."""
        self.copies: list[tuple[Place, Place]] = []
        """(from, to): blocks to copy, in this order, before the step being planned computes anything."""
        self.saves: list[BlockSave] = []
        """Blocks for other engines, as they will be after that step."""
        self.num_asked_tokens = 0
        """Looked for in the files of other engines, because the cache has not got them; since the start."""
        self.num_received_tokens = 0
        """Brought from there."""
        self._fresh: set[BlockKey] = set()
        """States that only the step being planned computes: nobody can read them in the same step."""
        self._enable_prefix_caching = enable_prefix_caching
        self._epoch = 0

    @property
    def num_usable_blocks(self) -> int:
        """Return how many blocks there are but the null block."""
        return self.pool.num_blocks - 1

    @property
    def num_used_blocks(self) -> int:
        """Return how many blocks requests hold."""
        return self.pool.num_used

    def peak_blocks(self, num_tokens: int, max_chunk: int) -> int:
        """Return the most blocks that computing `num_tokens` takes at once, without any sharing."""
        return sum(group.peak_blocks(num_tokens, max_chunk) for group in self.groups)

    def sharable_tokens(self, num_tokens: int) -> int:
        """Return how many leading tokens of so many may be shared by content: whole blocks in every group."""
        return num_tokens // self._hit_unit * self._hit_unit if self._enable_prefix_caching else 0

    @property
    def keeps_states(self) -> bool:
        """Return True if layers have states, which are known behind some tokens only."""
        return any(group.keeps_states for group in self.groups)

    def nothing(self) -> SharedPrefix:
        """Return the empty beginning."""
        return SharedPrefix(0, [[] for _ in self.groups], self._epoch)

    def match(self, chain: HashChain, token_ids: Sequence[int], num_left: int = 1) -> SharedPrefix:
        """Return the longest known beginning of `token_ids`, but the last one: one must be computed.

        num_left: so many tokens are not looked for at the end
        """
        if not self._enable_prefix_caching:
            return self.nothing()
        digests = chain.extend(token_ids)
        num_tokens = self._longest_hit(digests, len(token_ids) - num_left, self._has)
        prefix: list[list[int]] = []
        outside: list[Outside] = []
        for group in self.groups:
            first = group.first_needed(num_tokens)
            blocks = [NULL_BLOCK] * first
            for index, key in enumerate(group.keys(digests, first, num_tokens // group.block_size), first):
                block = self.pool.find(key)
                if block is None:
                    block = NULL_BLOCK
                    outside.append(Outside(group.index, index, self._place_outside(key)))
                blocks.append(block)
            prefix.append(blocks)
        return SharedPrefix(num_tokens, prefix, self._epoch, len(token_ids), outside)

    def prefetch(self, chain: HashChain, token_ids: Sequence[int], pull: Pull | None = None) -> None:
        """On any thread: read (or `pull`) what other engines have of a beginning, and the cache has not."""
        digests = chain.extend(token_ids)
        limit = (len(token_ids) - 1) // self._hit_unit * self._hit_unit
        num_known = self._longest_hit(digests, limit, self._has)
        self.num_asked_tokens += limit - num_known
        if pull is not None:
            pull([key for key in self._keys(digests, limit) if not self._has(key)])
            return
        num_tokens = self._longest_hit(
            digests, limit, lambda key: self._has(key) or self.shared.has_files(key)
        )
        self.shared.fetch(key for key in self._keys(digests, num_tokens) if not self._has(key))

    def publish(
        self, table: BlockTable, chain: HashChain, tokens: range, num_prompt: int, target: KVSource | None
    ) -> None:
        """Offer what these tokens fill to other engines, windows and states at the end; one may get it."""
        if self.shared.writes and table.epoch == self._epoch:
            for group, blocks, first_live in zip(self.groups, table.groups, table.first_live, strict=True):
                if group.is_full or tokens.stop == num_prompt:
                    first = tokens.start // group.block_size if group.is_full else first_live
                    keys = group.keys(chain.digests, first, tokens.stop // group.block_size)
                    self.saves += self.shared.saves(zip(blocks[first:], keys, strict=False), target)

    def count_cached(self, chain: HashChain, token_ids: Sequence[int], near: int) -> int:
        """About how much of the beginning of `token_ids` is in the cache, in the least that `match` may find.

        near: the last answer. Chains are lost from their tails, so one or two look-ups suffice where nothing
        has changed.
        """
        if not self._enable_prefix_caching:
            return 0
        digests = chain.extend(token_ids)
        stride = self._hit_unit // self.hash_block_size
        while near and not self._is_known(digests[near * stride - 1]):
            near -= 1
        while (near + 1) * stride <= len(digests) and self._is_known(digests[(near + 1) * stride - 1]):
            near += 1
        return near

    def fork(self, leader: BlockTable, num_tokens: int) -> SharedPrefix | None:
        """Return the leader's blocks of its first `num_tokens` tokens, a partly filled one included.

        None when the leader's window has passed some that the follower would read, or states these.
        """
        blocks = []
        for group, table, first_live in zip(self.groups, leader.groups, leader.first_live, strict=True):
            first = group.first_needed(num_tokens)
            live = table[first : group.num_blocks(num_tokens)]
            if group.keeps_states and num_tokens % group.block_size:
                if leader.num_forked != num_tokens or group.index not in leader.forked:
                    return None
                live = [leader.forked[group.index]]
            elif first < first_live:
                return None
            blocks.append([NULL_BLOCK] * first + live)
        return SharedPrefix(num_tokens, blocks, leader.epoch)

    def keep_fork(self, table: BlockTable, num_tokens: int) -> None:
        """Copy the states behind the first `num_tokens` tokens, all that are computed, for `fork`.

        Where there are no blocks for that, followers begin at what the prefix map has.
        """
        states = [group for group in self.groups if group.keeps_states and num_tokens % group.block_size]
        if not num_tokens or len(states) > self.pool.num_free:
            return
        self._drop_fork(table)
        table.num_forked = num_tokens
        for group, copy in zip(states, self.pool.allocate(len(states)), strict=True):
            state = table.groups[group.index][group.first_needed(num_tokens)]
            self.copies.append((Place(Tier.POOL, state), Place(Tier.POOL, copy)))
            table.forked[group.index] = copy

    def can_start(self, prefix: SharedPrefix, num_tokens: int, max_chunk: int) -> bool:
        """Return True if all `num_tokens` of a request with this beginning fit into what is free now."""
        needed = 0
        for group, blocks in zip(self.groups, prefix.blocks, strict=True):
            live = blocks[group.first_needed(prefix.num_tokens) :]
            num_shared = sum(self.pool.ref_count(block) > 0 for block in live)
            peak = group.peak_blocks(num_tokens, max_chunk)
            ahead = group.num_blocks(num_tokens) - len(blocks)
            # At first it holds `live` too; once the window has passed them, only blocks of its own.
            needed += max(min(len(live) + ahead, peak) - num_shared, min(ahead, peak))
            if prefix.num_tokens % group.block_size and not group.num_fixed:
                needed += 1  # the partly filled block is copied
        return needed <= self.pool.num_free

    def open(self, prefix: SharedPrefix) -> BlockTable:
        """Return a table of the blocks of `prefix`, which must have been found since the last change.

        What is outside the pool is copied into it.
        """
        first_live = [group.first_needed(prefix.num_tokens) for group in self.groups]
        for blocks, first in zip(prefix.blocks, first_live, strict=True):
            for block in blocks[first:]:
                if block != NULL_BLOCK:
                    self.pool.share(block)
        if prefix.outside:
            self._load(prefix)
        num_committed = prefix.num_tokens // self.hash_block_size
        table = BlockTable(prefix.blocks, first_live, num_committed, prefix.epoch)
        self._measure(table)
        return table

    def reserve(self, table: BlockTable, num_computed: int, num_new: int) -> list[list[int]] | None:
        """Make `table` ready for `num_new` tokens from `num_computed` on; None if they do not fit now.

        Frees what the window has passed. Returns the blocks appended, by group; a block that others hold too
        and that would be written is replaced by a copy (`copies`).
        """
        if not self.groups:  # of an encoder
            return []
        self._trim(table, num_computed)
        end = num_computed + num_new
        missing = [
            max(0, group.num_blocks(end) - len(blocks))
            for group, blocks in zip(self.groups, table.groups, strict=True)
        ]
        shared = self._shared_tails(table, num_computed)
        if sum(missing) + len(shared) > self.pool.num_free:
            self._drop_fork(table)
            if sum(missing) + len(shared) > self.pool.num_free:
                return None
        for blocks, index in shared:
            [copy] = self.pool.allocate(1)
            self.copies.append((Place(Tier.POOL, blocks[index]), Place(Tier.POOL, copy)))
            self.pool.release(blocks[index])
            blocks[index] = copy
        new_blocks = [self.pool.allocate(count) for count in missing]
        for blocks, new in zip(table.groups, new_blocks, strict=True):
            blocks.extend(new)
        self._measure(table)
        return new_blocks

    def commit(
        self, table: BlockTable, chain: HashChain, token_ids: Sequence[int], num_computed: int
    ) -> None:
        """Offer the full blocks of known, computed (or scheduled) tokens to the prefix map, each once.

        token_ids: the known tokens; num_computed may count further ones whose values are still pending.
        """
        known = min(num_computed, len(token_ids))
        start, end = table.num_committed, known // self.hash_block_size
        if end <= start:
            return
        table.num_committed = end
        if not self._enable_prefix_caching or table.epoch != self._epoch:
            return
        digests = chain.extend(token_ids)
        for group, blocks, first_live in zip(self.groups, table.groups, table.first_live, strict=True):
            first = max(start // group.digests_per_block, first_live)
            keys = group.keys(digests, first, known // group.block_size)
            for index, key in enumerate(keys, first):
                self.pool.remember(blocks[index], key)
            if group.keeps_states:
                self._fresh.update(keys)

    def release(self, table: BlockTable, *, discard: bool = False) -> None:
        """Give all blocks back, tails first; `discard`: what only this table holds is not shared again."""
        held = [
            (index * group.block_size, blocks[index])
            for group, blocks, first_live in zip(self.groups, table.groups, table.first_live, strict=True)
            for index in range(first_live, len(blocks))
        ]
        held.sort(key=itemgetter(0), reverse=True)
        for _, block in held:
            if discard and self.pool.ref_count(block) == 1 and (key := self.pool.forget(block)):
                self.host.discard(key)
            self.pool.release(block)
        self._drop_fork(table)
        table.groups = [[] for _ in self.groups]
        table.capacity = 0

    def take_copies(self) -> list[tuple[Place, Place]]:
        """Hand over the copies that the step being planned must do: it is complete."""
        self._fresh.clear()
        copies, self.copies = self.copies, []
        return copies

    def take_saves(self) -> list[BlockSave]:
        """Hand over the blocks to save after the step being planned."""
        saves, self.saves = self.saves, []
        return saves

    def reset_prefix_cache(self) -> None:
        """Forget all contents; tables in use keep their blocks, which are not shared by content any more.

        Files for other engines stay (`clear_shared_files`).
        """
        self.pool.forget_all()
        self.host.clear()
        self.shared.take_in()
        self.shared.clear()
        self._epoch += 1

    def clear_shared_files(self) -> None:
        """Remove the blocks that engines like this one share; none may be on its way there."""
        self.saves.clear()
        self.shared.clear_files()

    def _longest_hit(self, digests: list[bytes], limit: int, is_known: Callable[[BlockKey], bool]) -> int:
        """Return how many leading tokens, at most `limit`, no group needs to compute."""
        unit = self._hit_unit
        limit = limit // unit * unit
        while True:
            before = limit
            for group in self.groups:
                limit = group.longest_hit(digests, is_known, limit, unit)
            if limit == before:
                return limit

    def _has(self, key: BlockKey) -> bool:
        """Return True if this content is in the pool, in host memory, or on its way from files."""
        return key not in self._fresh and (
            self.pool.find(key) is not None
            or self.host.find(key) is not None
            or self.shared.find(key) is not None
        )

    def _keys(self, digests: list[bytes], num_tokens: int) -> list[BlockKey]:
        """Return the contents that a request needs to begin behind so many tokens."""
        return [
            key
            for group in self.groups
            for key in group.keys(digests, group.first_needed(num_tokens), num_tokens // group.block_size)
        ]

    def _place_outside(self, key: BlockKey) -> Place:
        """Return the place of a content that is not in the pool."""
        cell = self.host.find(key)
        if cell is not None:
            return Place(Tier.HOST, cell)
        number = self.shared.find(key)
        assert number is not None, "the content went while it was looked for"
        return Place(Tier.STEP, number)

    def _is_known(self, digest: bytes) -> bool:
        """Return True if any group has the content; those with a window lose it sooner."""
        return any(self._has((digest, group.index)) for group in self.groups)

    def _save(self, block: int, key: BlockKey) -> None:
        """Keep what `block` holds; called before it is handed out for something else."""
        cell = self.host.store(key)
        if cell is not None:
            self.copies.append((Place(Tier.POOL, block), Place(Tier.HOST, cell)))

    def _load(self, prefix: SharedPrefix) -> None:
        """Enter blocks with the contents that are outside the pool.

        They are pinned meanwhile: allocating blocks saves what those held before, to other cells.
        """
        tiers = [self.host if at.place.tier is Tier.HOST else self.shared for at in prefix.outside]
        keys = [tier.pin(at.place.number) for tier, at in zip(tiers, prefix.outside, strict=True)]
        self._count_received(prefix.outside)
        new_blocks = self.pool.allocate(len(keys))
        for (group, column, place), key, new in zip(prefix.outside, keys, new_blocks, strict=True):
            self.copies.append((place, Place(Tier.POOL, new)))
            self.pool.remember(new, key)
            prefix.blocks[group][column] = new
        for tier, at in zip(tiers, prefix.outside, strict=True):
            tier.unpin(at.place.number)

    def _count_received(self, contents: Sequence[Outside]) -> None:
        """Count the tokens of which any group gets keys and values from files."""
        received: set[int] = set()
        for group, column, place in contents:
            if place.tier is Tier.STEP:
                stride = self.groups[group].digests_per_block
                received.update(range(column * stride, (column + 1) * stride))
        self.num_received_tokens += len(received) * self.hash_block_size

    def _drop_fork(self, table: BlockTable) -> None:
        for block in table.forked.values():
            self.pool.release(block)
        table.forked = {}

    def _measure(self, table: BlockTable) -> None:
        """Enter how far the blocks of all groups reach."""
        capacities = (
            len(blocks) * group.block_size
            for group, blocks in zip(self.groups, table.groups, strict=True)
            if not group.num_fixed
        )
        table.capacity = min(capacities, default=sys.maxsize)

    def _trim(self, table: BlockTable, num_computed: int) -> None:
        for group, blocks, first_live in zip(self.groups, table.groups, table.first_live, strict=True):
            first_kept = min(group.first_kept(num_computed), len(blocks))
            for i in range(first_live, first_kept):
                self.pool.release(blocks[i])
                blocks[i] = NULL_BLOCK
            table.first_live[group.index] = max(first_live, first_kept)

    def _shared_tails(self, table: BlockTable, num_computed: int) -> list[tuple[list[int], int]]:
        """Return the groups' tables whose partly filled last block others hold too, and its index."""
        tails = []
        for group, blocks in zip(self.groups, table.groups, strict=True):
            index, offset = divmod(num_computed, group.block_size)
            if offset and not group.num_fixed and self.pool.ref_count(blocks[index]) > 1:
                tails.append((blocks, index))
        return tails
