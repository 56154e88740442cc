"""`log_mel` is what Whisper and those after it hear: a spectrogram on the mel scale, in logarithms.

Source: spectrogram and mel_filter_bank of transformers 5 (audio_utils), with Slaney's scale and norm.
"""

from functools import cache

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

Waveform = np.ndarray
"""[samples] float32, about -1 … 1."""
_LINEAR_TO, _MELS_THERE, _STEP = 1000.0, 15.0, np.log(6.4) / 27.0
_FLOOR, _RANGE = 1e-10, 8.0
"""Least power; and how far below the loudest all else is raised to, in powers of ten."""


def log_mel(waveform: Waveform, rate: int, num_mels: int, num_fft: int, hop: int) -> np.ndarray:
    """Return the spectrogram of all but the last frame: [num_mels, samples / hop] float32."""
    padded = np.pad(waveform, num_fft // 2, mode="reflect").astype(np.float64)
    frames = sliding_window_view(padded, num_fft)[::hop] * np.hanning(num_fft + 1)[:-1]
    spectrum = np.fft.rfft(frames).astype(np.complex64)
    power = np.abs(spectrum, dtype=np.float64) ** 2
    mels = np.maximum(_FLOOR, mel_filters(rate, num_mels, num_fft).T @ power.T)
    logs = np.log10(mels).astype(np.float32)[:, :-1]
    found: np.ndarray = (np.maximum(logs, logs.max() - np.float32(_RANGE)) + 4.0) / 4.0
    return found


@cache
def mel_filters(rate: int, num_mels: int, num_fft: int, highest: float = 8000.0) -> np.ndarray:
    """Return triangles over the bins of a transform, all of one area: [num_fft / 2 + 1, num_mels]."""
    bins = np.linspace(0, rate // 2, num_fft // 2 + 1)
    top = _MELS_THERE + np.log(highest / _LINEAR_TO) / _STEP if highest >= _LINEAR_TO else 3 * highest / 200
    mels = np.linspace(0.0, top, num_mels + 2)
    curved = _LINEAR_TO * np.exp(_STEP * (mels - _MELS_THERE))
    corners = np.where(mels >= _MELS_THERE, curved, 200.0 * mels / 3.0)
    return _triangles(bins, corners) * (2.0 / (corners[2:] - corners[:-2]))


def _triangles(bins: np.ndarray, corners: np.ndarray) -> np.ndarray:
    """Return how near each bin is to each inner corner, 1 … 0: [bins, corners - 2]."""
    slopes, widths = corners[None] - bins[:, None], np.diff(corners)
    rising, falling = -slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]
    filters: np.ndarray = np.maximum(0.0, np.minimum(rising, falling))
    return filters


def kaldi_log_mel(waveform: Waveform, rate: int, num_mels: int, highest: float) -> np.ndarray:
    """Return the spectrogram that Phi-4 hears: [frames, num_mels] float32, of 25 ms every 10 ms.

    Triangles on Kaldi's scale over windows with pre-emphasis. Source: Phi4MultimodalFeatureExtractor.
    """
    size, hop, num_fft, emphasis = 400, 160, 512, np.float32(0.97)
    if len(waveform) < size:
        return np.zeros((0, num_mels), np.float32)
    frames = sliding_window_view(waveform.astype(np.float32), size)[::hop]
    before = np.roll(frames, 1, axis=-1)
    before[:, 0] = before[:, 1]
    spectrum = np.fft.rfft((frames - emphasis * before) * np.float32(32768) * np.hamming(size), num_fft)
    power = np.abs(spectrum.astype(np.complex64)) ** 2
    mels = 1127.0 * np.log1p(np.arange(num_fft // 2 + 1) * rate / num_fft / 700.0)
    corners = np.linspace(0.0, 1127.0 * np.log1p(highest / 700.0), num_mels + 2)
    found: np.ndarray = np.log(np.maximum(power @ _triangles(mels, corners).astype(np.float32), 1.0))
    return found
