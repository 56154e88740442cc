"""KVCacheManager: tables, sharing, windows, copy on write."""

import pytest

from octavo.engine.kvcache.manager import KVCacheManager
from octavo.engine.kvcache.prefix import HashChain
from octavo.messages.kv import CachePlan
from tests.fakes import fake_groups

TOKENS = list(range(100, 120))


def manager(*windows, num_blocks=32, block_size=4, caching=True):
    return KVCacheManager(CachePlan(fake_groups(*windows), num_blocks, block_size), caching)


def fill(kv, tokens, salt=""):
    """A table with all tokens computed, as one chunk."""
    chain = HashChain(kv.hash_block_size, salt)
    table = kv.open(kv.nothing())
    assert kv.reserve(table, 0, len(tokens)) is not None
    kv.commit(table, chain, tokens, len(tokens))
    return table


def find(kv, tokens, salt=""):
    return kv.match(HashChain(kv.hash_block_size, salt), tokens)


def test_reserve_appends_what_is_missing():
    kv = manager(0)
    table = kv.open(kv.nothing())
    assert [len(blocks) for blocks in kv.reserve(table, 0, 5)] == [2]
    assert kv.reserve(table, 5, 3) == [[]]
    assert len(kv.reserve(table, 8, 1)[0]) == 1
    assert (len(table.groups[0]), table.capacity, kv.pool.num_used) == (3, 12, 3)
    kv.release(table)
    assert kv.pool.num_used == 0 and table.groups == [[]]


def test_reserve_changes_nothing_when_it_does_not_fit():
    kv = manager(0, 0, num_blocks=6)
    table = kv.open(kv.nothing())
    assert kv.reserve(table, 0, 12) is None
    assert kv.pool.num_used == 0
    assert kv.reserve(table, 0, 8) is not None


def test_hit_leaves_one_token_to_compute():
    kv = manager(0)
    kv.release(fill(kv, TOKENS))
    for length, expected in [(20, 16), (19, 16), (17, 16), (16, 12), (5, 4), (4, 0), (1, 0)]:
        prefix = find(kv, TOKENS[:length])
        assert (prefix.num_tokens, prefix.num_queried) == (expected, length)


def test_another_salt_or_another_beginning_shares_nothing():
    kv = manager(0)
    kv.release(fill(kv, TOKENS, "a"))
    assert find(kv, TOKENS, "a").num_tokens == 16
    assert find(kv, TOKENS, "b").num_tokens == 0
    assert find(kv, [0, *TOKENS[1:]], "a").num_tokens == 0


def test_without_prefix_caching_nothing_is_found_or_counted():
    kv = manager(0, caching=False)
    kv.release(fill(kv, TOKENS))
    assert find(kv, TOKENS) == (0, [[]], 0, 0, ())
    assert not kv.pool._by_key


def test_pending_tokens_are_not_committed():
    kv = manager(0)
    chain, table = HashChain(4), kv.open(kv.nothing())
    kv.reserve(table, 0, 8)
    kv.commit(table, chain, TOKENS[:6], 8)
    assert len(kv.pool._by_key) == 1
    kv.commit(table, chain, TOKENS[:8], 8)
    assert len(kv.pool._by_key) == 2


def test_window_frees_blocks_and_shows_null():
    kv = manager(4)
    table = fill(kv, TOKENS)
    kv.reserve(table, 20, 1)
    [blocks] = table.groups
    assert blocks[:4] == [0] * 4 and all(blocks[4:])  # positions 16 … 20 are kept
    assert kv.pool.num_used == 2
    kv.release(table)
    assert kv.pool.num_used == 0


def test_window_group_needs_only_its_last_window():
    kv = manager(4)
    kv.release(fill(kv, TOKENS))
    prefix = find(kv, TOKENS)
    assert prefix.num_tokens == 16 and prefix.blocks[0][:3] == [0, 0, 0] and prefix.blocks[0][3]
    kv.pool.forget(kv.pool.find((HashChain(4).extend(TOKENS)[0], 0)))
    assert find(kv, TOKENS).num_tokens == 16


def test_hit_is_what_all_groups_share():
    kv = manager(0, 4)
    kv.release(fill(kv, TOKENS))
    digests = HashChain(4).extend(TOKENS)
    kv.pool.forget(kv.pool.find((digests[3], 1)))
    assert find(kv, TOKENS).num_tokens == 12
    kv.pool.forget(kv.pool.find((digests[1], 0)))
    assert find(kv, TOKENS).num_tokens == 4


def test_tails_are_evicted_before_heads_in_all_groups():
    kv = manager(0, 0, num_blocks=11)
    kv.release(fill(kv, TOKENS))
    for expected in (16, 12, 8, 4, 0):
        assert find(kv, [*TOKENS, 0]).num_tokens == expected + 4
        kv.pool.allocate(2)


def test_fork_shares_full_blocks_and_copies_the_tail():
    kv = manager(0, 8)
    leader = fill(kv, TOKENS[:14])
    prefix = kv.fork(leader, 13)
    assert prefix.num_tokens == 13 and prefix.num_queried == 0
    child = kv.open(prefix)
    used = kv.pool.num_used
    assert kv.reserve(child, 13, 1) == [[], []]
    assert kv.pool.num_used == used + 2
    for mine, theirs in zip(child.groups, leader.groups, strict=True):
        assert mine[1:3] == theirs[1:3] and mine[3] != theirs[3]
    copies = [(source.number, target.number) for source, target in kv.take_copies()]
    assert sorted(copies) == sorted((leader.groups[g][3], child.groups[g][3]) for g in (0, 1))
    assert kv.take_copies() == []
    kv.release(leader)
    kv.release(child)
    assert kv.pool.num_used == 0


def test_fork_at_a_block_border_copies_nothing():
    kv = manager(0)
    leader = fill(kv, TOKENS[:13])
    child = kv.open(kv.fork(leader, 12))
    assert len(kv.reserve(child, 12, 1)[0]) == 1
    assert kv.take_copies() == []


def test_fork_is_possible_right_after_the_prompt_but_not_for_ever():
    kv = manager(4)
    for length in range(6, 20):
        leader = fill(kv, TOKENS[:length])
        kv.reserve(leader, length, 1)
        assert kv.fork(leader, length - 1) is not None
        kv.release(leader)
    leader = fill(kv, TOKENS[:12])
    kv.reserve(leader, 12, 8)
    kv.reserve(leader, 20, 1)
    assert kv.fork(leader, 11) is None


def test_reset_forgets_and_running_tables_stay_private():
    kv = manager(4)
    chain, table = HashChain(4), kv.open(kv.nothing())
    kv.reserve(table, 0, 6)
    kv.commit(table, chain, TOKENS[:6], 6)
    kv.reset_prefix_cache()
    assert find(kv, TOKENS).num_tokens == 0
    kv.reserve(table, 6, 6)
    kv.commit(table, chain, TOKENS[:12], 12)
    assert not kv.pool._by_key, "a block filled before the reset would be shared after it"


def test_discarded_blocks_are_not_found_unless_shared():
    kv = manager(0)
    table = fill(kv, TOKENS)
    other = kv.open(find(kv, TOKENS[:9]))
    kv.release(table, discard=True)
    assert find(kv, TOKENS).num_tokens == 8
    kv.release(other)


@pytest.mark.parametrize("windows", [(0,), (4,), (0, 4, 9)])
@pytest.mark.parametrize("max_chunk", [1, 5, 50])
def test_what_can_start_can_be_computed(windows, max_chunk):
    """A prompt that is said to fit runs through, chunk by chunk, when nobody else takes blocks."""
    for num_blocks in range(2, 30):
        kv = manager(*windows, num_blocks=num_blocks)
        for tokens in (TOKENS[:9], TOKENS[:13] + [1] * 7, TOKENS):
            prefix = find(kv, tokens)
            if not kv.can_start(prefix, len(tokens), max_chunk):
                assert kv.peak_blocks(len(tokens), max_chunk) > num_blocks - 1
                continue
            chain, table, computed = HashChain(4), kv.open(prefix), prefix.num_tokens
            while computed < len(tokens):
                chunk = min(max_chunk, len(tokens) - computed)
                assert kv.reserve(table, computed, chunk) is not None
                computed += chunk
                kv.commit(table, chain, tokens, computed)
            kv.release(table)
