"""FlatLogprobs reads like the list of dicts that it stands for."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.frontend.outputs.logprobs import FlatLogprobs, Logprob, LogprobSpeller, joined, kept_logprobs
from octavo.messages.request import TokenLogprobs
from tests.fakes import ByteTokenizer

ENTRIES = st.builds(Logprob, st.floats(-50, 0), st.integers(1, 9) | st.none(), st.none())
POSITIONS = st.lists(st.none() | st.dictionaries(st.integers(0, 300), ENTRIES, min_size=1, max_size=4))
INDEXES = st.none() | st.integers(-9, 9)


@given(POSITIONS, st.slices(8))
def test_reads_like_a_list(positions, part):
    flat = FlatLogprobs(positions)
    assert list(flat) == positions == flat
    assert len(flat) == len(positions)
    assert flat[part] == positions[part]
    assert isinstance(flat[part], FlatLogprobs)
    assert list(reversed(flat)) == positions[::-1]
    if positions:
        assert flat[-1] == positions[-1]
    with pytest.raises(IndexError):
        flat[len(positions)]


@given(POSITIONS, POSITIONS)
def test_parts_join(first, second):
    flat = FlatLogprobs(first)
    flat.extend(second)
    assert flat == first + second
    assert joined(FlatLogprobs(first), FlatLogprobs(second)) == first + second
    assert joined(first, second) == first + second
    assert joined(first, None) is None


def test_columns_are_vllms():
    flat = FlatLogprobs(
        [None, {7: Logprob(-0.5, 1, "a"), 9: Logprob(-1.5, 2, "b")}, {7: Logprob(-2.0, 4, "a")}]
    )
    assert (flat.start_indices, flat.end_indices) == ([0, 0, 2], [0, 2, 3])
    assert (flat.token_ids, flat.ranks) == ([7, 9, 7], [1, 2, 4])
    assert (flat.logprobs, flat.decoded_tokens) == ([-0.5, -1.5, -2.0], ["a", "b", "a"])


def test_positions_of_the_whole_vocabulary_are_read_one_at_a_time():
    entry = TokenLogprobs(list(range(2000)), [-1.0] * 2000, [1] * 2000)
    positions = kept_logprobs(2000, flat=False)
    for _ in range(3):
        LogprobSpeller(None).append(positions, entry)
    assert kept_logprobs(20, flat=False) == [] and isinstance(positions, FlatLogprobs)
    assert positions[1] is positions[1] and len(positions[1]) == 2000, "it is made once for many look-ups"
    assert positions[0] is not positions[1] and positions[2][1999] == Logprob(-1.0, 1)


def test_it_is_lighter():
    entry = TokenLogprobs(list(range(20)), [-float(i) for i in range(20)], list(range(1, 21)))
    speller = LogprobSpeller(ByteTokenizer())
    positions = []
    for _ in range(100):
        speller.append(positions, entry)
    flat = FlatLogprobs(positions)
    nested_bytes = sum(
        sys.getsizeof(p) + sum(sys.getsizeof(e) + sys.getsizeof(e.logprob) for e in p.values())
        for p in positions
    )
    flat_bytes = sum(map(sys.getsizeof, (flat._ids, flat._logprobs, flat._ranks, flat._texts, flat._ends)))
    assert flat_bytes < nested_bytes / 2.5


def test_a_character_is_shown_with_the_token_that_completes_it():
    first, second, third = "好".encode()
    speller = LogprobSpeller(ByteTokenizer(), context=[ord("a"), first])

    def spell(*token_ids):
        entry = TokenLogprobs(list(token_ids), [-1.0] * len(token_ids), [1] * len(token_ids))
        speller.append(positions, entry)
        return positions[-1] and [one.decoded_token for one in positions[-1].values()]

    positions = []

    assert spell(second, ord("b")) == ["", "\ufffdb"]
    assert spell(third, first) == ["好", "\ufffd"]
    assert spell(ord("c"), first) == ["c", ""]
    assert spell() is None


@pytest.mark.parametrize("kind", [list, FlatLogprobs])
def test_without_a_tokenizer_there_is_no_text(kind):
    positions = kind()
    LogprobSpeller(None).append(positions, TokenLogprobs([7], [-1.0], [1]))
    assert positions == [{7: Logprob(-1.0, 1)}]
