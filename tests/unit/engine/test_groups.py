"""CacheGroup: block arithmetic against a count position by position."""

import random

import pytest

from octavo.engine.kvcache.groups import CacheGroup
from octavo.messages.kv import KVCacheSpec


def group(window, block_size):
    return CacheGroup.from_spec(0, KVCacheSpec(1, 8, 64, sliding_window=window), block_size)


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
        assert g.longest_hit(lambda i, index, cached=cached: cached[i] and index == 0, 8) == expected
