"""HashChain: names of contents, made once per block."""

from hashlib import sha256

import pytest

from octavo.engine.kvcache import prefix
from octavo.engine.kvcache.prefix import HashChain


def test_only_full_blocks_have_a_digest():
    chain = HashChain(4)
    assert [len(chain.extend(list(range(n)))) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_growing_equals_hashing_at_once():
    tokens = list(range(37))
    grown = HashChain(4)
    for end in range(38):
        grown.extend(tokens[:end])
    assert grown.digests == HashChain(4).extend(tokens)


def test_a_block_is_hashed_once(monkeypatch):
    calls = []

    def counting(data):
        calls.append(data)
        return sha256(data)

    monkeypatch.setattr(prefix, "sha256", counting)
    chain = HashChain(4)
    for end in range(101):
        chain.extend(list(range(end)))
    assert len(calls) == 1 + 25


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (HashChain(2, "a"), HashChain(2, "b")),
        (HashChain(2, "a"), HashChain(2)),
        (HashChain(2, "ab"), HashChain(2, "a", b"b")),
        (HashChain(2, extra=b"adapter"), HashChain(2)),
        (HashChain(2, "\ud800"), HashChain(2, "\ud801")),
    ],
)
def test_salt_and_extra_separate_every_block(one, other):
    assert not set(one.extend([1, 2, 3, 4])) & set(other.extend([1, 2, 3, 4]))
    assert one.root != other.root


def test_a_digest_covers_everything_before_it():
    one, other = HashChain(2).extend([1, 2, 9, 9]), HashChain(2).extend([1, 3, 9, 9])
    assert one[1] != other[1]
    assert HashChain(2).extend([1, 2])[0] != HashChain(2).extend([2, 1])[0]
    assert HashChain(2).extend([1, 256])[0] != HashChain(2).extend([257, 0])[0]
