"""Where chunks end for the sake of images, and what distinguishes blocks of equal tokens."""

import pytest

from octavo.engine.kvcache.prefix import HashChain
from octavo.engine.scheduler.encoder_budget import EncoderBudget
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
