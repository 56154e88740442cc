"""Cache groups whose tokens take 2 and 3 times the bytes of others share one pool of blocks of one size.

The property machine drives such groups too, and checks what every block holds.
"""

import random

import pytest

from octavo.engine.core import EngineCore
from octavo.engine.kvcache.manager import KVCacheManager
from octavo.engine.kvcache.prefix import HashChain
from octavo.messages.kv import CachePlan
from octavo.messages.step import Tier
from tests.fakes import FakeExecutor, expected_output, fake_config, fake_groups, fake_request

TOKENS = list(range(100, 140))


def manager(*windows, heads, num_blocks=64, block_size=4):
    return KVCacheManager(CachePlan(fake_groups(*windows, heads=heads), num_blocks, block_size))


def fill(kv, tokens, **kind):
    chain, table = HashChain(kv.hash_block_size, **kind), kv.open(kv.nothing())
    assert kv.reserve(table, 0, len(tokens)) is not None
    kv.commit(table, chain, tokens, len(tokens))
    return table


def find(kv, tokens):
    return kv.match(HashChain(kv.hash_block_size), tokens)


@pytest.mark.parametrize(
    ("heads", "block_size", "sizes", "hashed"),
    [
        ((1, 1), 4, [4, 4], 4),
        ((2, 1), 4, [4, 8], 4),
        ((1, 3), 4, [12, 4], 4),
        ((3, 2), 4, [4, 6], 2),
        ((6, 2, 3), 4, [4, 12, 8], 4),
    ],
)
def test_blocks_have_one_size_in_bytes(heads, block_size, sizes, hashed):
    plan = CachePlan(fake_groups(*[0] * len(heads), heads=heads), 9, block_size)
    assert plan.block_sizes == sizes
    assert {g.spec.bytes_per_token * s for g, s in zip(plan.groups, sizes, strict=True)} == {
        plan.bytes_per_block
    }
    assert plan.bytes_per_token == 64 * sum(heads)
    assert KVCacheManager(plan).hash_block_size == hashed


def test_each_table_is_as_long_as_its_blocks_demand():
    kv = manager(0, 0, heads=(3, 1))
    table = kv.open(kv.nothing())
    assert [len(blocks) for blocks in kv.reserve(table, 0, 13)] == [4, 2]
    assert (table.capacity, kv.pool.num_used) == (16, 6)
    assert [len(blocks) for blocks in kv.reserve(table, 13, 4)] == [1, 0]
    assert [len(blocks) for blocks in kv.reserve(table, 17, 8)] == [2, 1]
    assert (table.capacity, [len(blocks) for blocks in table.groups]) == (28, [7, 3])
    assert kv.peak_blocks(25, 99) == kv.pool.num_used == 10
    kv.release(table)
    assert kv.pool.num_used == 0


def test_hits_end_with_whole_blocks_in_all_groups():
    kv = manager(0, 0, heads=(3, 2))  # blocks of 4 and 6 tokens
    kv.release(fill(kv, TOKENS[:38]))
    for length, expected in [(40, 36), (37, 36), (36, 24), (25, 24), (24, 12), (13, 12), (12, 0)]:
        prefix = find(kv, TOKENS[:length])
        assert prefix.num_tokens == expected
        assert [len(blocks) for blocks in prefix.blocks] == [expected // 4, expected // 6]
    digests = HashChain(2).extend(TOKENS)
    kv.pool.forget(kv.pool.find((digests[14], 1)))  # tokens 24 … 29 of the second group
    assert kv.pool.find((digests[14], 0)) is None, "no block of the first group ends there"
    assert find(kv, TOKENS).num_tokens == 24


def test_a_window_needs_its_own_blocks_only():
    kv = manager(5, 0, heads=(1, 2))  # blocks of 8 and 4 tokens
    table = fill(kv, TOKENS[:32])
    kv.reserve(table, 32, 1)
    assert [blocks.count(0) for blocks in table.groups] == [3, 0]
    prefix = find(kv, TOKENS)
    assert prefix.num_tokens == 32 and prefix.blocks[0][:3] == [0, 0, 0] and all(prefix.blocks[1])
    kv.release(table)


def test_a_fork_copies_the_partly_filled_blocks_of_some_groups():
    kv = manager(0, 0, heads=(2, 1))
    leader = fill(kv, TOKENS[:21])
    child = kv.open(kv.fork(leader, 20))  # 5 blocks of 4; 2 1/2 of 8
    assert kv.reserve(child, 20, 1) is not None
    assert kv.copies == [((Tier.POOL, leader.groups[1][2]), (Tier.POOL, child.groups[1][2]))]
    assert child.groups[0][:5] == leader.groups[0][:5] and child.groups[0][5] != leader.groups[0][5]
    kv.commit(child, HashChain(4), [*TOKENS[:20], 1, 2, 3, 4], 24)
    assert kv.match(HashChain(4), [*TOKENS[:20], 1, 2, 3, 4, 5]).num_tokens == 24
    for table in (leader, child):
        kv.release(table)
    assert kv.pool.num_used == 0


@pytest.mark.parametrize("heads", [(2, 1), (1, 3), (3, 2), (2, 3)])
@pytest.mark.parametrize("windows", [(0, 0), (0, 7), (5, 0)])
def test_requests_give_what_they_give_alone(windows, heads):
    """In a pool so small that requests are preempted; the fake device checks what they read."""
    rng = random.Random(3)
    config = fake_config(num_blocks=30, max_num_batched_tokens=16, cache={"swap_space": 4 * 64 * 12 / 2**30})
    core = EngineCore(config, FakeExecutor(fake_groups(*windows, heads=heads)))
    core.start()
    requests = [
        fake_request(f"r{i}", [rng.choice([1, 2])] * rng.randint(1, 26) + [i], 9, arrival_s=float(i))
        for i in range(30)
    ]
    for request in requests:
        core.add(request)
    found = {request.request_id: [] for request in requests}
    while core.has_work():
        for output in core.step().outputs:
            found[output.request_id] += output.new_token_ids
    assert found == {request.request_id: expected_output(request, 64)[0] for request in requests}
    stats = core.scheduler.stats()
    assert stats.num_preemptions and stats.prefix_hits and core.scheduler.kv.pool.num_used == 0
