"""`time_tokens` and `read_words`: when each word was said, by how a transcript's tokens attend to the sound.

Tokens and frames are matched by dynamic time warping over the attention of some heads, as Whisper's authors
do (https://github.com/openai/whisper, timing.py) and transformers after them, whose numbers these are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from octavo.frontend.speech.segments import Decode

_MEDIAN = 7
_SECONDS_PER_POSITION = 0.02
_WITHOUT_SPACES = (
    "zh",
    "ja",
    "th",
    "lo",
    "my",
    "yue",
    "chinese",
    "japanese",
    "thai",
    "lao",
    "myanmar",
    "cantonese",
)
_OPENING, _CLOSING = "\"'“¡¿([{-「『", "\"'.。,，!！?？:：”)]}、」』"


@dataclass(slots=True)
class Word:
    """A word with its punctuation. start, end: seconds in the whole audio"""

    word: str
    start: float
    end: float


def time_tokens(weights: np.ndarray, num_positions: int) -> np.ndarray:
    """Return when each token begins, in seconds of its window.

    weights: [heads, T, S], attention of T tokens, each as the input of a step
    num_positions: of the sound; what follows is silence
    """
    weights = weights[..., : max(1, num_positions)].astype(np.float32)
    spread = weights.std(axis=-2, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        weights = (weights - weights.mean(axis=-2, keepdims=True)) / spread
    weights = np.nan_to_num(_smoothed(weights)).mean(axis=0)
    rows, columns = _warp(-weights.astype(np.float64))
    begins = np.diff(rows, prepend=-1) > 0
    times: np.ndarray = columns[begins] * _SECONDS_PER_POSITION
    return times


def _smoothed(weights: np.ndarray) -> np.ndarray:
    """Return medians over time."""
    if weights.shape[-1] <= _MEDIAN // 2:
        return weights
    pad = [(0, 0)] * (weights.ndim - 1) + [(_MEDIAN // 2, _MEDIAN // 2)]
    windows = sliding_window_view(np.pad(weights, pad, mode="reflect"), _MEDIAN, axis=-1)
    medians: np.ndarray = np.partition(windows, _MEDIAN // 2, axis=-1)[..., _MEDIAN // 2]
    return medians


def _warp(costs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the cheapest monotone path through costs [T, S] as rows and columns.

    Diagonal after diagonal, whose entries do not depend on each other.
    """
    num_rows, num_columns = costs.shape
    total = np.full((num_rows + 1, num_columns + 1), np.inf, np.float32)
    trace = np.zeros((num_rows + 1, num_columns + 1), np.int8)
    total[0, 0] = 0
    for diagonal in range(2, num_rows + num_columns + 1):
        i = np.arange(max(1, diagonal - num_columns), min(num_rows, diagonal - 1) + 1)
        j = diagonal - i
        both, down, right = total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]
        is_both, is_down = (both < down) & (both < right), (down < both) & (down < right)
        trace[i, j] = np.where(is_both, 0, np.where(is_down, 1, 2))
        least = np.where(is_both, both, np.where(is_down, down, right))
        total[i, j] = costs[i - 1, j - 1] + least
    trace[0, :], trace[:, 0] = 2, 1
    path, i, j = [], num_rows, num_columns
    while i > 0 or j > 0:
        path.append((i - 1, j - 1))
        step = trace[i, j]
        i, j = i - (step < 2), j - (step != 1)
    rows, columns = np.array(path[::-1]).T
    return rows, columns


def read_words(
    tokens: Sequence[int],
    times: Sequence[float],
    ends_s: float,
    decode: Decode,
    language: str,
    start_s: float,
) -> list[Word]:
    """Return words of text tokens. times: when each begins, in seconds of a window that begins at start_s

    ends_s: when the last one ends
    """
    words: list[tuple[str, int]] = []
    for text, first in _pieces(tokens, decode):
        is_new = language in _WITHOUT_SPACES or not words or text[:1].isspace() or _is_mark(text)
        if is_new:
            words.append((text, first))
        else:
            words[-1] = (words[-1][0] + text, words[-1][1])
    joined = _with_marks(words)
    begins = [float(times[first]) for _, first in joined] + [ends_s]
    return [
        Word(text, start_s + begin, start_s + max(begin, end))
        for (text, _), begin, end in zip(joined, begins, begins[1:], strict=False)
        if text.strip()
    ]


def _pieces(tokens: Sequence[int], decode: Decode) -> list[tuple[str, int]]:
    """Return whole characters: the texts of as many tokens as make up some, and the first of these."""
    pieces, first = [], 0
    for end in range(1, len(tokens) + 1):
        text = decode(tokens[first:end])
        if "\N{REPLACEMENT CHARACTER}" not in text:
            pieces.append((text, first))
            first = end
    if first < len(tokens):
        pieces.append((decode(tokens[first:]), first))
    return pieces


def _is_mark(text: str) -> bool:
    stripped = text.strip()
    return bool(stripped) and all(not char.isalnum() for char in stripped)


def _with_marks(words: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Put opening marks before the next word, and closing ones behind the last."""
    joined: list[tuple[str, int]] = []
    opening: tuple[str, int] | None = None
    for word, begin in words:
        text, first = word, begin
        if text.startswith(" ") and text.strip() and text.strip() in _OPENING:
            opening = (text, first) if opening is None else (opening[0] + text, opening[1])
            continue
        if opening is not None:
            text, first, opening = opening[0] + text.lstrip(), opening[1], None
        if joined and not text.startswith(" ") and text.strip() and text.strip() in _CLOSING:
            joined[-1] = (joined[-1][0] + text, joined[-1][1])
        else:
            joined.append((text, first))
    return joined if opening is None else [*joined, opening]
