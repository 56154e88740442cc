"""Windows, segments, words and rules of prompts, without a model."""

import numpy as np
import pytest
from transformers.models.whisper import tokenization_whisper as theirs

from octavo.base.errors import RequestError
from octavo.frontend.speech.model import SpeechModel
from octavo.frontend.speech.segments import Segment, read_segments, srt, vtt
from octavo.frontend.speech.windows import split
from octavo.frontend.speech.words import _warp, _words, read_words
from octavo.messages.speech import TranscriptRules

RATE, END, FIRST = 1600, 1000, 1010


def test_windows_end_where_it_is_quiet():
    rng = np.random.default_rng(0)
    sound = rng.standard_normal(10 * RATE).astype(np.float32)
    sound[int(3.4 * RATE) : int(3.6 * RATE)] = 0
    windows = split(sound, RATE, 4.0)
    assert np.array_equal(np.concatenate([window.samples for window in windows]), sound)
    assert all(len(window.samples) <= 4 * RATE for window in windows) and len(windows) >= 3
    starts = np.cumsum([0, *(len(window.samples) for window in windows)])[:-1] / RATE
    assert starts.tolist() == [window.start_s for window in windows]
    assert len(split(sound[: 4 * RATE], RATE, 4.0)) == 1


TEXTS = {1: " He", 2: "llo", 3: ",", 4: " “", 5: "wor", 6: "ld", 7: "”", 8: ".", 9: " Zü", 10: "-", 11: "ri"}
TEXTS |= {
    12: "\N{REPLACEMENT CHARACTER}",
    13: "ch",
    14: " (",
    15: "é",
    16: ")",
    17: "!",
    18: " ",
    19: "日",
    20: "本",
}


class Tokenizer:
    """transformers' code asks for these."""

    eos_token_id = END
    language = "english"

    def decode(self, ids, **options):
        return decode(ids)


def decode(ids):
    return "".join(TEXTS[i] for i in ids).replace("\N{REPLACEMENT CHARACTER}ch", "chch")


@pytest.mark.parametrize("language", ["en", "zh"])
def test_words_are_those_of_transformers(language):
    name = {"en": "english", "zh": "chinese"}[language]
    rng = np.random.default_rng(0)
    for length in (0, 1, 2, 5, 12, 30, 30, 30, 30):
        ids = rng.integers(1, 21, length).tolist()
        if ids and ids[-1] == 12:
            ids.append(13)
        words, _, indices = theirs._combine_tokens_into_words(Tokenizer(), list(ids), name)
        expected = [(word, at[0], at[-1]) for word, at in zip(words, indices, strict=True)]
        assert _words(ids, decode, language) == expected


def test_times_of_words():
    times = np.array([0.2, 0.4, 0.5, 0.9, 1.3])
    words = read_words([1, 2, FIRST + 20, 9, 11], times, END, decode, "en", 30.0)
    assert [(w.word, w.start, w.end) for w in words] == [(" Hello", 30.0, 30.4), (" Züri", 30.5, 31.3)]


def test_the_cheapest_path():
    """Against the plain double loop that transformers has."""
    from transformers.models.whisper.generation_whisper import _dynamic_time_warping

    for seed in range(5):
        costs = np.random.default_rng(seed).standard_normal((7 + seed, 40))
        for ours, expected in zip(_warp(costs), _dynamic_time_warping(costs), strict=True):
            np.testing.assert_array_equal(ours, expected)


def test_segments():
    tokens = [FIRST + 10, 1, 2, FIRST + 50, FIRST + 50, 9, FIRST + 40, 5]
    found = read_segments(tokens, [-0.5] * 8, FIRST, decode, 60.0, 62.0, 60.5)
    assert [(s.text, s.start, s.end) for s in found] == [
        (" Hello", 60.5, 61.0),
        (" Zü", 61.0, 61.0),  # times never go back
        ("wor", 61.0, 62.0),
    ]
    assert found[0].tokens == [1, 2] and found[0].avg_logprob == -0.5 and found[0].compression_ratio > 0


def test_subtitles_cannot_be_broken_by_text():
    text = "one\n\n2\n00:00:00,000 --> 00:00:01,000\nno"
    segment = Segment(3661.5, 3662.0, text, [1])
    assert srt([segment]).count("-->") == 1 and srt([segment]).count("\n\n") == 1
    assert srt([segment]).startswith("1\n01:01:01,500 --> 01:01:02,000\n")
    assert vtt([segment]).startswith("WEBVTT\n\n01:01:01.500 --> ")


def test_prompts():
    rules = TranscriptRules(END, FIRST)
    model = SpeechModel(
        1, END, FIRST - 1, 2, 3, {"en": 4, "de": 5}, {"transcribe": 6, "translate": 7}, rules, rules, [], 3
    )
    assert model.prompt("de", "translate", timestamps=True) == [1, 5, 7]
    assert model.prompt("EN", "transcribe", timestamps=False, previous=[8, 9, 10, 11]) == [
        *(2, 9, 10, 11, 1, 4, 6, FIRST - 1)
    ]
    with pytest.raises(RequestError, match=r"Unsupported language: 'xx'. Language must be one of de, en\."):
        model.prompt("xx", "transcribe", timestamps=True)
    assert model.begun([4]) == [1, 4] and model.begun([2, 9, 1]) == [2, 9, 1]
