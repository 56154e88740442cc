"""Incremental decoding and stop strings on hand-made cases (any case: property/test_detokenizer_splits)."""

import time

import pytest

from octavo.frontend.text.detokenizer import Detokenizer
from octavo.frontend.text.stop import StopFinder
from tests.fakes import ByteTokenizer

BYTES = ByteTokenizer()


def test_a_character_waits_for_its_bytes():
    detokenizer = Detokenizer(BYTES)
    assert [detokenizer.feed([b]) for b in "a🤗é".encode()] == ["a", "", "", "", "🤗", "", "é"]
    assert detokenizer.finish() == ""


def test_what_can_no_longer_become_a_character_is_shown_at_once():
    detokenizer = Detokenizer(BYTES)
    assert [detokenizer.feed([b]) for b in b"\xf0\x9fa\x80"] == ["", "", "\ufffda", "\ufffd"]
    assert detokenizer.feed(b"\xe2\x82") == ""
    assert detokenizer.finish() == "\ufffd"


def test_special_tokens():
    ids = [BYTES.BOS, 104, 105, BYTES.EOS]
    assert Detokenizer(BYTES).feed(ids) == "hi"
    assert Detokenizer(BYTES, skip_special_tokens=False).feed(ids) == "<s>hi</s>"


def test_what_the_context_left_broken_is_not_shown():
    emoji = list("🙂".encode())
    broken = Detokenizer(BYTES, context=[104, *emoji[:2]])
    assert broken.feed([123]) + broken.feed([emoji[0], 125]) + broken.finish() == "{\ufffd}"
    assert Detokenizer(BYTES, context=emoji[:2]).finish() == ""
    shared = Detokenizer(BYTES, context=emoji[:1])
    assert shared.feed(emoji[1:2]) + shared.finish() == "\ufffd"
    meant = list("\ufffd".encode())
    assert Detokenizer(BYTES, context=meant[:2]).feed([meant[2], 33]) == "\ufffd!"


def test_context_is_not_shown_but_its_last_character_goes_on():
    emoji = "🤗".encode()
    detokenizer = Detokenizer(BYTES, context=[104, *emoji[:2]])
    assert detokenizer.feed(emoji[2:]) == "🤗"


def test_spaces_between_special_tokens():
    import tokenizers

    from octavo.frontend.text.tokenizer import Tokenizer

    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    backend.add_special_tokens(["<x>", "<y>"])
    tokenizer = Tokenizer(backend)
    assert Detokenizer(tokenizer, skip_special_tokens=False).feed([0, 1, 2, 0]) == "a <x> <y> a"
    packed = Detokenizer(tokenizer, skip_special_tokens=False, spaces_between_special_tokens=False)
    assert packed.feed([0, 1, 2, 0]) == "a <x><y> a"


def test_time_is_linear_even_without_a_single_character():
    detokenizer, begun = Detokenizer(BYTES), time.process_time()
    for _ in range(100_000):
        detokenizer.feed([0x80])
    assert time.process_time() - begun < 5


def stream(finder, pieces):
    """(text shown, stop string, pieces consumed)."""
    shown = []
    for n, piece in enumerate(pieces):
        text, stop = finder.feed(piece)
        shown.append(text)
        if stop is not None:
            return "".join(shown), stop, n + 1
    return "".join(shown) + finder.finish(), None, len(pieces)


@pytest.mark.parametrize(
    ("stops", "pieces", "text", "stop"),
    [
        (["STOP"], ["abST", "OPxyz"], "ab", "STOP"),
        (["STOP"], ["abST", "O"], "abSTO", None),
        (["\n\n"], ["a\n", "b\n", "\nc"], "a\nb", "\n\n"),
        (["b", "abc"], ["a", "b", "c"], "a", "b"),
        (["bc", "abc"], ["xabc"], "x", "abc"),
        (["abc", "xabcd"], ["xabcd"], "x", "abc"),
        (["x"], ["x"], "", "x"),
        (["aab"], ["aa", "aa", "b"], "aa", "aab"),
    ],
)
def test_stop_strings(stops, pieces, text, stop):
    assert stream(StopFinder(stops), pieces)[:2] == (text, stop)
    included = text + (stop or "")
    assert stream(StopFinder(stops, include_stop=True), pieces)[:2] == (included, stop)
    whole = "".join(pieces)
    assert stream(StopFinder(stops), list(whole))[:2] == (text, stop)


def test_a_beginning_is_held_back():
    finder = StopFinder(["STOP"])
    assert finder.feed("abcd").text == "a"
    assert finder.feed("e").text == "b"
    assert finder.finish() == "cde"
    assert finder.finish() == ""


def test_included_stops_hold_nothing_back():
    finder = StopFinder(["STOP"], include_stop=True)
    assert finder.feed("abcST").text == "abcST"
    assert finder.feed("OPx") == ("OP", "STOP")


def test_not_armed():
    finder = StopFinder(["ab"])
    assert finder.feed("xab", armed=False).stop is None
    assert finder.feed("y").stop is None
    finder = StopFinder(["ab"])
    finder.feed("xa", armed=False)
    assert finder.feed("b").stop == "ab"
