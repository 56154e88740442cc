"""The host tier: its own bookkeeping, what the manager keeps in it and gets back, and whether it pays."""

import random

import pytest

from octavo.engine.kvcache.manager import KVCacheManager
from octavo.engine.kvcache.offload import HostTier, swapping_pays
from octavo.engine.kvcache.prefix import HashChain
from octavo.messages.kv import CachePlan
from octavo.messages.step import Tier
from tests.fakes import fake_groups


def key(i):
    return (b"%d" % i, 0)


def test_the_least_recently_used_content_gives_way():
    tier = HostTier(3)
    assert [tier.store(key(i)) for i in range(3)] == [0, 1, 2]
    assert tier.store(key(0)) is None, "it is there"
    assert tier.store(key(3)) == 1, "0 was used after 1"
    assert (tier.find(key(0)), tier.find(key(1)), tier.find(key(3))) == (0, None, 1)
    assert tier.pin(2) == key(2)
    tier.unpin(2)
    assert tier.store(key(4)) == 0, "2 was used after 0"
    assert (tier.num_stored, tier.num_loaded, len(tier._free)) == (5, 1, 0)


def test_pinned_cells_are_not_written():
    tier = HostTier(2)
    tier.store(key(0))
    tier.store(key(1))
    tier.pin(0)
    assert tier.store(key(2)) == 1
    tier.pin(1)
    assert tier.store(key(3)) is None
    tier.unpin(0)
    assert tier.store(key(3)) == 0
    with pytest.raises(AssertionError, match="no content"):
        tier.pin(1)


def test_no_cells_no_contents():
    tier = HostTier(0)
    assert tier.store(key(0)) is None and tier.find(key(0)) is None
    tier.clear()


def test_free_and_used_cells_are_all():
    random.seed(5)
    tier = HostTier(7)
    held = {}
    for _ in range(3000):
        one = key(random.randrange(12))
        match random.choice(["store", "store", "discard", "pin"]):
            case "store":
                cell = tier.store(one)
                if cell is not None:
                    held = {k: c for k, c in held.items() if c != cell} | {one: cell}
            case "discard":
                tier.discard(one)
                held.pop(one, None)
            case "pin" if one in held:
                assert tier.pin(held[one]) == one
                tier.unpin(held[one])
        assert tier._cells == held
        assert len(held) + len(tier._free) == 7


def tiers(copy):
    """From which tier to which."""
    source, target = copy
    return source.tier, target.tier


class Cache:
    """A manager with a host tier, and requests that compute whole prompts at once."""

    def __init__(self, num_blocks=5, num_host_blocks=4, windows=(0,)):
        self.kv = KVCacheManager(CachePlan(fake_groups(*windows), num_blocks, 2, num_host_blocks))

    def run(self, tokens):
        """Compute `tokens` and end; tokens that were known, and the copies that this took."""
        chain = HashChain(2)
        prefix = self.kv.match(chain, tokens)
        assert self.kv.can_start(prefix, len(tokens), len(tokens))
        num_known = prefix.num_tokens
        table = self.kv.open(prefix)
        assert self.kv.reserve(table, num_known, len(tokens) - num_known) is not None
        self.kv.commit(table, chain, tokens, len(tokens))
        self.kv.release(table)
        return num_known, self.kv.take_copies()


def test_evicted_blocks_come_back_by_their_content():
    cache = Cache()
    first, second = [1, 2, 3, 4, 5, 6], [7, 8, 9, 7, 8, 9]
    assert cache.run(first) == (0, [])
    known, copies = cache.run(second)
    assert known == 0 and len(copies) == 2 and all(tiers(copy) == (Tier.POOL, Tier.HOST) for copy in copies)
    known, copies = cache.run(first)
    assert known == 4, "one block is computed: that is what is needed to go on"
    loaded = set()
    for source, target in copies:
        assert source not in loaded, "a block is saved before its place is taken"
        if source.tier is Tier.HOST:
            loaded.add(target)
    assert cache.kv.host.num_loaded == len(loaded) > 0


def test_a_content_is_written_once():
    cache = Cache(num_blocks=4, num_host_blocks=20)
    prompts = [[i] * 6 for i in range(4)]
    for prompt in prompts * 5:
        cache.run(prompt)
    assert cache.kv.host.num_stored <= len(prompts) * 3
    assert cache.kv.host.num_loaded > 20


def test_a_tier_smaller_than_what_comes_back():
    """Every cell is being read: what gives way to the loads is lost, and nothing is mixed up."""
    cache = Cache(num_blocks=5, num_host_blocks=1)
    for prompt in ([1] * 8, [2] * 8, [1] * 8, [3] * 8, [1] * 8, [2] * 8):
        _, copies = cache.run(prompt)
        assert len(cache.kv.host._cells) <= 1
        assert all(set(tiers(copy)) == {Tier.POOL, Tier.HOST} for copy in copies)


def test_windows_bring_back_only_what_is_seen():
    cache = Cache(num_blocks=13, num_host_blocks=40, windows=(0, 2))
    first = list(range(12))
    cache.run(first)
    for i in range(3):
        cache.run([50 + i] * 10)
    cache.kv.take_copies()
    known, copies = cache.run([*first, 99])
    loads = [target for source, target in copies if source.tier is Tier.HOST]
    assert known == 12
    assert 1 <= len(loads) <= 6 + 1, "all of the full group, the last block of the window"


def test_what_failed_is_forgotten_in_both_places():
    cache = Cache()
    cache.run([1] * 6)
    cache.run([2] * 8)
    assert cache.kv.host._cells
    chain = HashChain(2)
    prefix = cache.kv.match(chain, [1] * 6)
    table = cache.kv.open(prefix)
    assert prefix.num_tokens == 4
    cache.kv.release(table, discard=True)
    assert cache.kv.match(HashChain(2), [1] * 6).num_tokens == 0


def test_a_reset_empties_the_tier():
    cache = Cache()
    cache.run([1] * 6)
    cache.run([2] * 8)
    cache.kv.reset_prefix_cache()
    assert not cache.kv.host._cells and len(cache.kv.host._free) == 4
    assert cache.kv.match(HashChain(2), [1] * 6).num_tokens == 0


def test_swapping_pays_where_computing_is_dear():
    gpu_8b, gpu_135m = (131072, 16 << 30, "cuda"), (23040, 270 << 20, "cuda")
    assert swapping_pays(*gpu_8b) and not swapping_pays(*gpu_135m)
    assert swapping_pays(23040, 100 << 20, "cpu")
    assert swapping_pays(23040, 0, "cuda") and swapping_pays(1 << 20, 1, "tpu"), "not known: try it"
