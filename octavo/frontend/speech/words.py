"""`time_tokens` and `read_words`: when each word was said, by how a transcript's tokens attend to the sound.

Tokens and frames are matched by dynamic time warping over the attention of some heads, as Whisper's authors
do (https://github.com/openai/whisper, timing.py) and transformers after them, whose numbers these are.
"""

import string
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from octavo.frontend.speech.segments import Decode

_MEDIAN = 7
_SECONDS_PER_POSITION = 0.02
_WITHOUT_SPACES = ("zh", "ja", "th", "lo", "my", "yue")
_OPENING, _CLOSING, _BROKEN = "\"'“¡¿([{-", "\"'.。,，!！?？:：”)]}、", "\N{REPLACEMENT CHARACTER}"


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
    tokens: Sequence[int], times: np.ndarray, end_id: int, decode: Decode, language: str, start_s: float
) -> list[Word]:
    """Return the words of a window, which begins at start_s.

    tokens: of text, and times from end_id on, at which words end, too
    times: as `time_tokens` gives them: a token is said from that of the one before to its own
    """
    words: list[Word] = []
    begins = np.concatenate([[0.0], times[:-1]])
    first = 0
    for end in range(len(tokens) + 1):
        if end < len(tokens) and tokens[end] < end_id:
            continue
        for text, i, j in _words(tokens[first:end], decode, language):
            begin, close = float(begins[first + i]), float(times[first + j])
            words.append(Word(text, round(start_s + begin, 2), round(start_s + close, 2)))
        first = end + 1
    return words


def _words(tokens: Sequence[int], decode: Decode, language: str) -> list[tuple[str, int, int]]:
    """Return the words of a segment, each with the places of its first and its last token."""
    words: list[tuple[str, int, int]] = []
    for text, i, j in _pieces(tokens, decode):
        is_new = language in _WITHOUT_SPACES or text.startswith(" ") or text.strip() in string.punctuation
        if is_new or not words:
            words.append((text, i, j))
        else:
            words[-1] = (words[-1][0] + text, words[-1][1], j)
    joined: list[tuple[str, int, int]] = []
    for text, i, j in reversed(words):
        if joined and text.startswith(" ") and text.strip() in _OPENING:
            joined[-1] = (text + joined[-1][0], i, joined[-1][2])
        else:
            joined.append((text, i, j))
    words = []
    for text, i, j in reversed(joined):
        if words and not words[-1][0].endswith(" ") and text in _CLOSING:
            words[-1] = (words[-1][0] + text, words[-1][1], j)
        else:
            words.append((text, i, j))
    return words


def _pieces(tokens: Sequence[int], decode: Decode) -> list[tuple[str, int, int]]:
    """Return whole characters: the text of as many tokens as make up some, and the first and last."""
    whole, pieces, first, length = decode(tokens), [], 0, 0
    for end in range(1, len(tokens) + 1):
        text = decode(tokens[first:end])
        at = text.find(_BROKEN)
        if at < 0 or length + at >= len(whole) or whole[length + at] == _BROKEN:
            pieces.append((text, first, end - 1))
            first, length = end, length + len(text)
    return pieces
