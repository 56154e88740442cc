"""A file or a caller's array becomes a waveform: float32, one channel, at the model's rate.

Decoding and resampling are FFmpeg's, through PyAV. Texts of errors are ours: libraries' may tell addresses.
"""

from io import BytesIO
from itertools import chain
from typing import Any

import av
import msgspec
import numpy as np

from octavo.base.errors import RequestError
from octavo.frontend.media.spectrogram import Waveform

FORMATS = ("wav", "mp3", "flac", "ogg", "mov", "matroska", "webm", "aac", "aiff", "amr")
"""By FFmpeg's names; demuxers of others are never tried: some open further files."""
_NAMES = "WAV, MP3, FLAC, Ogg, M4A, MP4, WebM, AAC, AIFF, AMR"
_OPTIONS = {"format_whitelist": ",".join(FORMATS), "protocol_whitelist": ""}
_DAMAGED = f"Failed to load audio: the file is damaged, or none of {_NAMES}."


class AudioLimits(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """How a sound is read, and what is refused. is_plain: it is only decoded"""

    rate: int
    max_seconds: float
    is_plain: bool = False


def decode_audio(content: bytes, limits: AudioLimits) -> Waveform:
    """Return the first audio stream of a file, its channels mixed. Raises RequestError."""
    rate, max_seconds = limits.rate, limits.max_seconds
    pieces: list[Waveform] = []
    left = int(max_seconds * rate)
    try:
        with av.open(BytesIO(content), mode="r", options=_OPTIONS) as container:
            if not container.streams.audio:
                raise RequestError("Failed to load audio: the file has no audio stream.", "audio")
            mixer = av.AudioResampler(format="flt", layout="mono", rate=rate)
            for frame in chain(container.decode(audio=0), (None,)):
                for out in mixer.resample(frame):
                    pieces.append(out.to_ndarray()[0])
                    left -= len(pieces[-1])
                if left < 0:
                    raise RequestError(
                        f"The audio is longer than max_audio_seconds={max_seconds:g}.", "audio"
                    )
    except RequestError:
        raise
    except MemoryError:
        raise RequestError("Failed to load audio: it needs too much memory.", "audio") from None
    except (av.FFmpegError, OSError, ValueError, IndexError, EOFError, TypeError):
        raise RequestError(_DAMAGED, "audio") from None
    waveform = np.concatenate(pieces) if pieces else np.zeros(0, np.float32)
    if not len(waveform):
        raise RequestError("Failed to load audio: the file holds no sound.", "audio")
    return waveform


def native_rate(content: bytes) -> int:
    """Return the rate of the first audio stream of a file. Raises RequestError."""
    try:
        with av.open(BytesIO(content), mode="r", options=_OPTIONS) as container:
            return int(container.streams.audio[0].rate)
    except (av.FFmpegError, OSError, ValueError, IndexError, EOFError, TypeError):
        raise RequestError(_DAMAGED, "audio") from None


def to_waveform(value: Any, limits: AudioLimits) -> Waveform:
    """Return what a Python caller gives: samples at the model's rate, or (samples, rate).

    samples: [n], or [channels, n] with fewer channels than samples. Raises RequestError.
    """
    rate, max_seconds = limits.rate, limits.max_seconds
    given, own_rate = value if isinstance(value, tuple) and len(value) == 2 else (value, rate)
    array = np.asarray(given.detach().cpu() if hasattr(given, "detach") else given)
    if array.ndim == 2:
        array = array.mean(axis=int(array.shape[1] < array.shape[0]))
    is_rate = isinstance(own_rate, int | float) and not isinstance(own_rate, bool) and 0 < own_rate < 2**31
    if array.ndim != 1 or array.dtype.kind != "f" or not array.size or not is_rate:
        got = f"{type(value).__name__} {getattr(array, 'shape', '')} {array.dtype}"
        raise RequestError(
            "Audio must be the bytes of a file, an array of floats of shape (samples,) or "
            f"(channels, samples), or (array, sampling rate); got {got}.",
            "multi_modal_data",
        )
    if len(array) > max_seconds * own_rate:
        raise RequestError(f"The audio is longer than max_audio_seconds={max_seconds:g}.", "multi_modal_data")
    if not np.isfinite(array).all():
        raise RequestError("Audio must hold finite numbers.", "multi_modal_data")
    array = np.ascontiguousarray(array, np.float32)
    return array if own_rate == rate else resampled(array, int(own_rate), rate)


def resampled(waveform: Waveform, rate: int, wanted: int) -> Waveform:
    """Return the same sound at another rate."""
    frame = av.AudioFrame.from_ndarray(waveform[None], format="flt", layout="mono")
    frame.sample_rate = rate
    mixer = av.AudioResampler(format="flt", layout="mono", rate=wanted)
    return np.concatenate([out.to_ndarray()[0] for given in (frame, None) for out in mixer.resample(given)])
