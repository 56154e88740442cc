"""Any split of any ids gives the text of the whole; stop strings are found as in the whole text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.frontend.text.detokenizer import Detokenizer
from octavo.frontend.text.stop import StopFinder
from tests.fakes import ByteTokenizer
from tests.real_tokenizers import NASTY, real_tokenizer

TEXT = st.text(max_size=40) | st.sampled_from(NASTY) | st.text("ab🤗é\n ▁<|>", max_size=30)


@pytest.fixture(scope="module", params=["bytes", "smollm2", "gemma3"])
def tokenizer(request):
    if request.param == "bytes":
        return ByteTokenizer()
    return real_tokenizer(request.getfixturevalue(f"{request.param}_path"))


def ids_of(data, tokenizer):
    """Ids of a text with any ids at all between them."""
    ids = []
    for _ in range(data.draw(st.integers(1, 4))):
        text = data.draw(TEXT.filter(lambda t: not any("\ud800" <= c <= "\udfff" for c in t)))
        ids += tokenizer.encode(text, add_special_tokens=data.draw(st.booleans()))
        ids += data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=6))
    return ids


def pieces_of(data, items):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(items)), max_size=12)))
    return [items[a:b] for a, b in zip([0, *cuts], [*cuts, len(items)], strict=True)]


@settings(deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_deltas_join_to_the_whole(tokenizer, data, skip):
    ids = ids_of(data, tokenizer)
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    shown = [detokenizer.feed(piece) for piece in pieces_of(data, ids)]
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(shown) + detokenizer.finish() == whole
    text_ids = tokenizer.encode("né🤗", add_special_tokens=False)
    assert "\ufffd" not in "".join(Detokenizer(tokenizer).feed(text_ids[:n]) for n in range(len(text_ids)))


@settings(deadline=None)
@given(data=st.data())
def test_output_continues_its_prompt(tokenizer, data):
    prompt = tokenizer.encode(data.draw(st.sampled_from(NASTY)))
    ids = ids_of(data, tokenizer)
    detokenizer = Detokenizer(tokenizer, context=prompt)
    shown = [detokenizer.feed(piece) for piece in pieces_of(data, ids)]
    whole = tokenizer.decode([*prompt, *ids])
    assert tokenizer.decode(prompt) + "".join(shown) + detokenizer.finish() == whole


@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4),
    include=st.booleans(),
    data=st.data(),
)
def test_stops_do_not_depend_on_the_split(text, stops, include, data):
    ends = {n: [s for s in stops if text[:n].endswith(s)] for n in range(len(text) + 1)}
    first = next((n for n, found in ends.items() if found), None)
    expected = text, None
    if first is not None:
        stop = max(ends[first], key=len)
        expected = text[: first - (0 if include else len(stop))], stop
    finder, shown, found = StopFinder(stops, include_stop=include), "", None
    for piece in pieces_of(data, text):
        piece_text, found = finder.feed(piece)
        shown += piece_text
        assert expected[0].startswith(shown)
        if found is not None:
            break
    assert (shown + finder.finish(), found) == expected
