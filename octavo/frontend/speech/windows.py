"""`split` cuts long audio into windows that the model can hear, where it is quiet."""

from typing import NamedTuple

import numpy as np

from octavo.frontend.media.spectrogram import Waveform

_SEARCHED_S = 1.0
_QUIET_SAMPLES = 1600


class Window(NamedTuple):
    """A piece of audio. start_s: where it begins in the whole; samples: float32"""

    start_s: float
    samples: Waveform


def split(waveform: Waveform, rate: int, seconds: float) -> list[Window]:
    """Return windows of at most `seconds`, which follow each other without a gap.

    Each ends in the quietest tenth of a second of its last second, so that few words are cut (as in vLLM).
    """
    most, windows, start = int(seconds * rate), [], 0
    while len(waveform) - start > most:
        end = start + most
        end = _quietest(waveform, end - int(_SEARCHED_S * rate), end)
        windows.append(Window(start / rate, waveform[start:end]))
        start = end
    return [*windows, Window(start / rate, waveform[start:])]


def _quietest(waveform: Waveform, first: int, last: int) -> int:
    """Return the middle of the samples with the least energy between two places."""
    energy = np.concatenate([[0.0], np.square(waveform[first:last], dtype=np.float64).cumsum()])
    sums = energy[_QUIET_SAMPLES:] - energy[:-_QUIET_SAMPLES]
    return first + int(sums.argmin()) + _QUIET_SAMPLES // 2
