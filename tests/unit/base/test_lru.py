"""The memory that is bounded by bytes."""

from octavo.base.lru import LRU


def test_the_least_recently_used_goes_first():
    memory = LRU(10)
    memory.put("a", 1, 4)
    memory.put("b", 2, 4)
    assert memory.get("a") == 1
    memory.put("c", 3, 4)
    assert (memory.get("a"), memory.get("b"), memory.get("c")) == (1, None, 3)
    assert (len(memory), memory.num_bytes) == (2, 8)


def test_a_replaced_entry_counts_once():
    memory = LRU(10)
    memory.put("a", 1, 9)
    memory.put("a", 2, 5)
    memory.put("b", 3, 5)
    assert (memory.get("a"), memory.get("b"), memory.num_bytes) == (2, 3, 10)


def test_what_is_larger_than_the_bound_is_not_kept():
    memory = LRU(10)
    memory.put("a", 1, 11)
    assert memory.get("a") is None and memory.num_bytes == 0
