"""CacheGroup: block arithmetic against a count position by position."""

import random

import pytest

from octavo.engine.kvcache.groups import CacheGroup
from octavo.messages.kv import CachePlan, HeadsKV, KVCacheGroup


def group(window, block_size):
    spec = HeadsKV(1, 8, "float32", 64, sliding_window=window)
    return CacheGroup.all_of(CachePlan([KVCacheGroup(spec, (0,))], 1, block_size))[0]


def seen(position, window):
    """Positions that the query at `position` reads."""
    return range(max(0, position - window + 1) if window else 0, position + 1)


@pytest.mark.parametrize("window", [0, 1, 2, 5, 8, 64])
@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_first_needed_and_first_kept(window, block_size):
    for computed in range(40):
        g = group(window, block_size)
        assert g.first_needed(computed) == seen(computed, window)[0] // block_size
        # what a sibling needs that goes back by one position is kept
        assert g.first_kept(computed) <= g.first_needed(max(0, computed - 1)) <= g.first_needed(computed)


@pytest.mark.parametrize("window", [0, 1, 4, 7])
@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_peak_is_reached_and_never_exceeded(window, block_size):
    g, rng = group(window, block_size), random.Random(0)
    for max_chunk in (1, 3, 8, 50):
        for num_tokens in (1, 2, 9, 30):
            most = 0
            for attempt in range(300):
                computed = 0
                while computed < num_tokens:
                    chunk = min(
                        num_tokens - computed, max_chunk if attempt == 0 else rng.randint(1, max_chunk)
                    )
                    end = -(-(computed + chunk) // block_size)
                    most = max(most, end - g.first_kept(computed))
                    computed += chunk
            assert most <= g.peak_blocks(num_tokens, max_chunk) <= most + 1


@pytest.mark.parametrize("window", [0, 1, 3, 6])
@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_longest_hit_is_the_longest(window, block_size):
    g, rng = group(window, block_size), random.Random(1)
    for _ in range(300):
        cached = [rng.random() < 0.7 for _ in range(8)]

        def usable(blocks, cached=cached):
            first_query = blocks * block_size
            needed = {p // block_size for p in seen(first_query, window) if p < first_query}
            return all(cached[i] for i in needed)

        expected = max(blocks for blocks in range(9) if usable(blocks))
        found = g.longest_hit(range(8), lambda key, cached=cached: cached[key[0]], 8 * block_size, block_size)
        assert found == expected * block_size


@pytest.mark.parametrize("window", [0, 1, 5, 14])
@pytest.mark.parametrize(("block_size", "unit"), [(2, 4), (2, 6), (4, 12)])
def test_longest_hit_in_units_of_several_blocks(window, block_size, unit):
    """Two digests per block; the hit ends where blocks of other sizes end, too."""
    g, rng = CacheGroup(0, block_size, window or 1 << 40, digests_per_block=2), random.Random(2)
    limit = 4 * unit
    for _ in range(300):
        cached = [rng.random() < 0.8 for _ in range(limit // block_size)]

        def usable(num_tokens, cached=cached):
            return all(cached[p // block_size] for p in seen(num_tokens, window) if p < num_tokens)

        expected = max(tokens for tokens in range(0, limit + 1, unit) if usable(tokens))
        digests = range(2 * len(cached))
        assert all(g.key(digests, i) == (2 * i + 1, 0) for i in range(len(cached)))
        assert g.keys(digests, 1, 3) == [(3, 0), (5, 0)]
        found = g.longest_hit(digests, lambda key, cached=cached: cached[key[0] // 2], limit, unit)
        assert found == expected
