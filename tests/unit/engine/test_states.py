"""Cache groups that keep states: blocks as large as a state, hits where states are kept, forks by copies."""

import pytest

from octavo.engine.kvcache.manager import KVCacheManager
from octavo.engine.kvcache.prefix import HashChain
from octavo.messages.kv import CachePlan, KVCacheGroup, StateKV
from octavo.messages.step import Place, Tier
from tests.fakes import fake_groups

TOKENS = list(range(100, 140))


def plan(num_bytes=200, num_blocks=64, interval=8):
    groups = [*fake_groups(0), KVCacheGroup(StateKV(num_bytes), (1,))]
    return CachePlan(groups, num_blocks, 4, state_interval=interval)


def compute(kv, table, chain, tokens, *chunks):
    """Compute chunks, a step each."""
    done = 0
    for count in chunks:
        assert kv.reserve(table, done, count) is not None
        done += count
        kv.commit(table, chain, tokens, done)
        kv.take_copies()
    return done


def find(kv, tokens):
    return kv.match(HashChain(kv.hash_block_size), tokens)


@pytest.mark.parametrize(
    ("num_bytes", "interval", "sizes"),
    [(200, 8, [4, 8]), (256, 9, [4, 12]), (257, 8, [8, 8]), (1000, 8, [16, 16])],
)
def test_a_block_holds_a_state(num_bytes, interval, sizes):
    made = plan(num_bytes, interval=interval)
    assert made.block_sizes == sizes
    assert made.layer_block_bytes == 64 * sizes[0] >= num_bytes
    assert (made.bytes_per_token, made.state_bytes) == (64, num_bytes)


def test_states_alone():
    made = CachePlan([KVCacheGroup(StateKV(100), (0, 1))], 9, 4, state_interval=24)
    assert (made.block_sizes, made.layer_block_bytes, made.state_bytes) == ([24], 100, 200)


def test_a_running_request_holds_one_state():
    kv = KVCacheManager(plan())
    table, chain = kv.open(kv.nothing()), HashChain(4)
    compute(kv, table, chain, TOKENS, 30, 1, 1, 1)
    kv.reserve(table, 35, 1)
    assert [sum(b > 0 for b in blocks) for blocks in table.groups] == [9, 1]
    assert kv.peak_blocks(36, 30) >= kv.num_used_blocks
    kv.release(table)
    assert kv.num_used_blocks == 0


def test_hits_end_where_states_are_kept():
    kv = KVCacheManager(plan())
    compute(kv, kv.open(kv.nothing()), HashChain(4), TOKENS, 30)
    found = find(kv, TOKENS[:30])
    assert found.num_tokens == 24
    assert [sum(b > 0 for b in blocks) for blocks in found.blocks] == [6, 1]
    assert find(kv, [*TOKENS[:23], 1, 2, 3]).num_tokens == 16
    assert find(kv, TOKENS[:8]).num_tokens == 0  # one token must be computed


def test_states_of_a_step_are_found_by_the_next():
    """Within a step other requests cannot read them yet."""
    kv = KVCacheManager(plan())
    table, chain = kv.open(kv.nothing()), HashChain(4)
    assert kv.reserve(table, 0, 20) is not None
    kv.commit(table, chain, TOKENS[:20], 20)
    assert find(kv, TOKENS[:20]).num_tokens == 0
    kv.take_copies()
    assert find(kv, TOKENS[:20]).num_tokens == 16


def test_a_fork_gets_copies():
    kv = KVCacheManager(plan())
    leader, chain = kv.open(kv.nothing()), HashChain(4)
    compute(kv, leader, chain, TOKENS, 13)
    assert kv.fork(leader, 13) is None
    kv.keep_fork(leader, 13)
    state = leader.groups[1][1]
    assert kv.reserve(leader, 13, 1) is not None
    prefix = kv.fork(leader, 13)
    kept = prefix.blocks[1][1]
    assert kept != state and prefix.blocks[0] == leader.groups[0]
    follower = kv.open(prefix)
    kv.reserve(follower, 13, 1)
    own = follower.groups[1][1]
    pool = [Place(Tier.POOL, block) for block in (state, kept, kept, own)]
    assert kv.take_copies()[:1] == [(pool[0], pool[1])]
    assert len({state, kept, own}) == 3
    assert kv.fork(leader, 12) is None
    for table in (leader, follower):
        kv.release(table)
    assert kv.num_used_blocks == 0


def test_a_kept_fork_gives_way():
    kv = KVCacheManager(plan(num_blocks=8))
    leader = kv.open(kv.nothing())
    compute(kv, leader, HashChain(4), TOKENS, 13)  # 4 + 2 blocks, the first state is passed
    kv.keep_fork(leader, 13)
    assert leader.forked
    assert kv.reserve(leader, 15, 2) is not None
    assert not leader.forked and kv.fork(leader, 13) is None
