"""BlockPool: reference counts, the order of reuse, the prefix map."""

import pytest

from octavo.engine.kvcache.block_pool import BlockError, BlockPool
from tests.fakes import free_blocks


def keyed(pool, blocks):
    for block in blocks:
        pool.remember(block, (b"%d" % block, 0))
    return blocks


def test_null_block_is_never_handed_out():
    pool = BlockPool(5)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert (pool.num_free, pool.num_used) == (0, 4)


def test_allocating_more_than_is_free_raises():
    with pytest.raises(BlockError, match="3 blocks asked for, 2 are free"):
        BlockPool(3).allocate(3)


def test_a_pool_of_the_null_block_only_has_nothing_to_give():
    pool = BlockPool(1)
    assert pool.num_free == 0 and free_blocks(pool) == []


def test_double_free_and_use_after_free_raise():
    pool = BlockPool(4)
    [block] = pool.allocate(1)
    pool.release(block)
    with pytest.raises(BlockError, match="freed twice"):
        pool.release(block)
    with pytest.raises(BlockError, match="used after it was freed"):
        pool.share(block)
    with pytest.raises(BlockError):
        pool.release(0)
    with pytest.raises(BlockError):
        pool.remember(block, (b"x", 0))


def test_shared_block_is_freed_by_its_last_holder():
    pool = BlockPool(3)
    [block] = pool.allocate(1)
    pool.share(block)
    pool.release(block)
    assert pool.ref_count(block) == 1 and pool.num_free == 1
    pool.release(block)
    assert pool.ref_count(block) == 0 and pool.num_free == 2


def test_blocks_without_content_are_reused_before_known_ones_and_those_by_age():
    pool = BlockPool(7)
    blocks = pool.allocate(6)
    known, unknown = keyed(pool, blocks[:4]), blocks[4:]
    for block in [known[2], unknown[0], known[0], known[3], unknown[1], known[1]]:
        pool.release(block)
    assert free_blocks(pool) == [unknown[1], unknown[0], known[2], known[0], known[3], known[1]]
    assert pool.allocate(3) == [unknown[1], unknown[0], known[2]]


def test_evicting_removes_the_key_first():
    pool = BlockPool(3)
    first, second = keyed(pool, pool.allocate(2))
    pool.release(first)
    assert pool.find((b"%d" % first, 0)) == first
    assert pool.allocate(1) == [first]
    assert pool.find((b"%d" % first, 0)) is None
    assert pool._by_key == {(b"%d" % second, 0): second}


def test_a_free_known_block_can_be_taken_back():
    pool = BlockPool(4)
    [block] = keyed(pool, pool.allocate(1))
    pool.release(block)
    pool.share(block)
    assert pool.ref_count(block) == 1 and block not in free_blocks(pool)


def test_the_first_block_with_a_content_keeps_the_key():
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.remember(first, (b"same", 0))
    pool.remember(second, (b"same", 0))
    assert pool.find((b"same", 0)) == first
    pool.remember(second, (b"same", 1))
    assert pool.find((b"same", 1)) == second, "another group is another content"


def test_forget_all_keeps_counts():
    pool = BlockPool(4)
    first, second = keyed(pool, pool.allocate(2))
    pool.release(first)
    pool.forget_all()
    assert not pool._by_key and pool.num_free == 2 and pool.ref_count(second) == 1
    with pytest.raises(BlockError):
        pool.share(first)
