"""When a transcript is decoded again: the rules of Whisper's authors."""

import pytest

from octavo.frontend.speech.fallback import Fallback
from octavo.frontend.speech.segments import compression_ratio


def test_temperatures():
    assert Fallback().temperatures(0.0) == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert Fallback().temperatures(0.7) == [0.9]
    assert Fallback(increment=0).temperatures(0.0) == []
    assert Fallback().temperatures(1.5) == []


@pytest.mark.parametrize(
    ("text", "score", "no_speech", "poor", "silent"),
    [
        ("The quick brown fox jumps over the lazy dog.", -0.3, 0.01, False, False),
        ("Thank you. " * 40, -0.1, 0.01, True, False),
        ("mumble", -1.2, 0.5, True, False),
        ("mumble", -1.2, 0.7, True, True),
        ("The quick brown fox jumps over the lazy dog.", -0.3, 0.9, False, False),
        ("mumble", -1.2, None, True, False),
    ],
)
def test_thresholds(text, score, no_speech, poor, silent):
    rules = Fallback()
    assert rules.is_poor(compression_ratio(text), score) is poor
    assert rules.is_silence(no_speech, score) is silent
