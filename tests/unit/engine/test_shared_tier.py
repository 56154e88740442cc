"""Contents on their way from files into blocks: what is read, held, found, brought and let go."""

import pytest

from octavo.base.block_files import BlockFiles, BlockName
from octavo.engine.kvcache import shared
from octavo.engine.kvcache.manager import KVCacheManager
from octavo.engine.kvcache.prefix import HashChain
from octavo.messages.kv import CachePlan, StorePlan
from octavo.messages.step import Tier
from tests.fakes import fake_groups

KIND = b"k" * 32
BLOCK_BYTES = 2 * 64
"""Two slots of one layer of tests.fakes."""


class World:
    """An engine's bookkeeping over a folder that another one fills."""

    def __init__(self, folder, windows=(0,), num_ranks=1, reads=True, writes=True, num_host_blocks=0):
        self.files = BlockFiles(str(folder), KIND, 1 << 30)
        self.num_ranks = num_ranks
        store = StorePlan(str(folder), KIND, 1 << 30, num_ranks, reads, writes)
        self.kv = KVCacheManager(CachePlan(fake_groups(*windows), 9, 2, num_host_blocks, store=store))

    def fill(self, tokens, groups=(0,)):
        for i, digest in enumerate(HashChain(2).extend(tokens)):
            for group in groups:
                for rank in range(self.num_ranks):
                    self.files.write(BlockName(digest, group, rank), bytes([i, group, rank]) * 42 + b"xx")

    def start(self, tokens):
        """Prepare, add, start: tokens found, copies, contents."""
        self.kv.prefetch(HashChain(2), tokens)
        self.kv.shared.take_in()
        chain = HashChain(2)
        prefix = self.kv.match(chain, tokens)
        assert self.kv.can_start(prefix, len(tokens), len(tokens))
        num_tokens = prefix.num_tokens
        table = self.kv.open(prefix)
        assert self.kv.reserve(table, num_tokens, len(tokens) - num_tokens) is not None
        self.kv.commit(table, chain, tokens, len(tokens))
        self.kv.publish(table, chain, range(len(tokens)), len(tokens), None)
        return num_tokens, self.kv.take_copies(), self.kv.shared.take_leaving(), table


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_is_in_files_comes_along_with_the_step(tmp_path, num_ranks):
    world = World(tmp_path, num_ranks=num_ranks, num_host_blocks=3)
    world.fill([1, 2, 3, 4, 5, 6])
    num_tokens, copies, contents, table = world.start([1, 2, 3, 4, 5, 6, 7])
    assert num_tokens == 6
    assert [target.number for _, target in copies] == table.groups[0][:3]
    assert [source for source, _ in copies] == [(Tier.STEP, i) for i in contents] and len(contents) == 3
    expected = [[bytes([i, 0, rank]) * 42 + b"xx" for rank in range(num_ranks)] for i in range(3)]
    assert list(contents.values()) == expected
    assert world.kv.num_asked_tokens == world.kv.num_received_tokens == 6
    assert world.start([1, 2, 3, 4, 5, 6, 8])[:3] == (6, [], {}), "it is in the pool now"
    assert world.kv.num_asked_tokens == 6


def test_reading_ends_where_something_is_missing(tmp_path):
    world = World(tmp_path)
    world.fill([1, 2, 3, 4, 5, 6])
    digests = HashChain(2).extend([1, 2, 3, 4, 5, 6])
    path = world.files._folder / str(BlockName(digests[1], 0, 0))
    path.write_bytes(path.read_bytes()[:-1])
    assert world.start([1, 2, 3, 4, 5, 6, 7])[0] == 2


def test_windows_ask_for_what_they_see(tmp_path):
    world = World(tmp_path, windows=(0, 2))
    tokens = [1, 2, 3, 4, 5, 6]
    world.fill(tokens)
    digest = HashChain(2).extend(tokens)[2]
    assert world.start([*tokens, 7])[0] == 0
    world.files.write(BlockName(digest, 1, 0), bytes(BLOCK_BYTES))
    world = World(tmp_path, windows=(0, 2))
    num_tokens, copies, contents, _ = world.start([*tokens, 7])
    assert num_tokens == 6 and len(copies) == len(contents) == 3 + 1


def test_no_more_is_held_than_may_be(tmp_path, monkeypatch):
    monkeypatch.setattr(shared, "MAX_HELD_BYTES", 3 * BLOCK_BYTES)
    world = World(tmp_path)
    first, second = [1] * 8, [2] * 8
    world.fill(first)
    world.fill(second)
    world.kv.prefetch(HashChain(2), [*first, 0])
    world.kv.prefetch(HashChain(2), [*second, 0])
    world.kv.shared.take_in()
    assert world.kv.match(HashChain(2), [*first, 0]).num_tokens == 6
    assert world.kv.match(HashChain(2), [*second, 0]).num_tokens == 0
    world.kv.prefetch(HashChain(2), [*second, 0])
    world.kv.shared.take_in()
    assert world.kv.match(HashChain(2), [*second, 0]).num_tokens == 6, "older ones gave way"
    assert world.kv.match(HashChain(2), [*first, 0]).num_tokens == 0


def test_what_is_on_its_way_is_not_read_twice(tmp_path, monkeypatch):
    world = World(tmp_path)
    world.fill([1] * 6)
    read, names = BlockFiles.read, []
    monkeypatch.setattr(
        BlockFiles, "read", lambda files, name, size: names.append(name) or read(files, name, size)
    )
    for _ in range(3):
        world.kv.prefetch(HashChain(2), [1] * 7)
    assert len(names) == 3
    assert world.start([1] * 7)[0] == 6 and len(names) == 3


def test_each_prompt_block_is_offered_once(tmp_path):
    world = World(tmp_path)
    table = world.start([1, 2, 3, 4, 5])[3]
    saves = world.kv.take_saves()
    assert [(save.block, save.group) for save in saves] == [(block, 0) for block in table.groups[0][:2]]
    assert [save.digest for save in saves] == HashChain(2).extend([1, 2, 3, 4])
    world.kv.release(table)
    world.start([1, 2, 3, 4, 6])
    assert world.kv.take_saves() == []
    reader = World(tmp_path, writes=False)
    reader.start([7, 7, 7])
    assert reader.kv.take_saves() == []


def test_a_reset_forgets_what_is_held(tmp_path):
    world = World(tmp_path)
    world.fill([1] * 6)
    world.kv.prefetch(HashChain(2), [1] * 7)
    world.kv.reset_prefix_cache()
    assert world.kv.match(HashChain(2), [1] * 7).num_tokens == 0
    assert world.start([1] * 7)[0] == 6, "it is read again"


def test_parts_of_a_prompt_are_offered_as_they_are_computed(tmp_path):
    """Each block once; of a window only what is kept in the end."""
    world, tokens, chain = World(tmp_path, windows=(0, 3)), [1, 2, 3, 4, 5, 6, 7], HashChain(2)
    table = world.kv.open(world.kv.match(chain, tokens))
    offered = []
    for part in (range(3), range(3, 4), range(4, 7)):
        assert world.kv.reserve(table, part.start, len(part)) is not None
        world.kv.commit(table, chain, tokens, part.stop)
        world.kv.publish(table, chain, part, 7, None)
        offered.append([(save.group, chain.digests.index(save.digest)) for save in world.kv.take_saves()])
    assert offered == [[(0, 0)], [(0, 1)], [(0, 2), (1, 0), (1, 1), (1, 2)]]
