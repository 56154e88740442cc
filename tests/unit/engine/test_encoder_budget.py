"""Where chunks end for the sake of images, and what distinguishes blocks of equal tokens."""

import pytest

from octavo.engine.kvcache.manager import KVCacheManager
from octavo.engine.kvcache.prefix import HashChain
from octavo.engine.scheduler.encoder_budget import EncoderBudget
from octavo.messages.kv import CachePlan, CrossKV, HeadsKV, KVCacheGroup
from octavo.messages.media import MediaItem, block_identities


def item(start, length, key=b"a", **more):
    return MediaItem("image", start, length, 120, key, {}, **more)


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [(0, 4, 4), (0, 10, 10), (0, 30, 20), (5, 30, 20), (20, 30, 30)],
)
def test_the_budget_ends_chunks(start, end, expected):
    """The first image of a step may exceed it; the next waits."""
    media = [item(4, 8, b"a"), item(20, 8, b"b")]
    assert EncoderBudget(8).cut(media, start, end, 99) == expected


def test_equal_images_count_once():
    budget = EncoderBudget(8)
    assert budget.cut([item(4, 8)], 0, 12, 99) == 12
    assert budget.cut([item(2, 8)], 0, 12, 99) == 12
    assert budget.cut([item(2, 8, b"b")], 0, 12, 99) == 2


def test_what_sees_itself_is_whole():
    media = [item(4, 8, sees_itself=True)]
    assert EncoderBudget(99).cut(media, 0, 6, 99) == 12
    assert EncoderBudget(99).cut(media, 0, 6, 10) == 4
    assert EncoderBudget(99).cut(media, 4, 6, 10) == 4
    assert EncoderBudget(99).cut(media, 6, 7, 99) == 12  # behind a prefix that others have computed


def test_identities_of_blocks():
    tokens = [1] * 16

    def digests(*media):
        return HashChain(4, identities=block_identities(media, 4)).extend(tokens)

    plain, first, second = digests(), digests(item(5, 6)), digests(item(5, 6, b"b"))
    assert plain[0] == first[0] == second[0]
    assert len({plain[1], first[1], second[1], digests(item(6, 6))[1]}) == 4
    assert first[2:] != second[2:]
    both = digests(item(4, 1, b"a"), item(5, 1, b"b"))
    assert both[1] != digests(item(4, 1, b"b"), item(5, 1, b"a"))[1]


def test_sources_share_the_budget():
    """The first of a step may exceed it, equal ones count once, and others wait."""
    budget = EncoderBudget(100)
    assert budget.take(b"a", 150) and budget.take(b"a", 150)
    assert not budget.take(b"b", 1)
    budget = EncoderBudget(100)
    assert budget.take(b"a", 60) and not budget.take(b"b", 60) and budget.take(b"c", 40)


def test_blocks_of_sources():
    """They are all there from the first step on, never named, never copied, and bound no length."""
    own = HeadsKV(2, 8, "float32", 128)
    cross = CrossKV(2, 8, "float32", 128, num_tokens=50)
    plan = CachePlan([KVCacheGroup(own, (0,)), KVCacheGroup(cross, (1,))], 32, 16)
    manager = KVCacheManager(plan)
    chain = HashChain(16)
    ids = list(range(40))
    assert manager.peak_blocks(40, 16) == 3 + 4
    table = manager.open(manager.match(chain, ids))
    assert [len(blocks) for blocks in manager.reserve(table, 0, 20)] == [2, 4]
    assert table.capacity == 32
    assert [len(blocks) for blocks in manager.reserve(table, 20, 20)] == [1, 0]
    manager.commit(table, chain, ids, 40)
    follower = manager.fork(table, 39)
    other = manager.open(follower)
    assert other.groups[1] == table.groups[1] and manager.reserve(other, 39, 1) is not None
    assert len(manager.copies) == 1, "the tail of its own tokens alone is copied"
    found = manager.match(chain, ids)
    assert found.num_tokens == 32 and [len(blocks) for blocks in found.blocks] == [2, 0]
    for each in (table, other):
        manager.release(each)
    assert manager.num_used_blocks == 0
