"""`AudioProcessor` says what a family makes of a sound; `WhisperProcessor`: of 30 s, for its encoder."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from octavo.base.errors import BadCheckpoint, RequestError
from octavo.frontend.media.processors.media import Arrays, Encode, MediaProcessor, Settings
from octavo.frontend.media.spectrogram import Waveform, log_mel


class AudioProcessor(MediaProcessor):
    """Hears log-mel spectrograms (WhisperFeatureExtractor)."""

    SETTINGS = "feature_extractor"
    DEFAULTS: ClassVar[Settings] = {
        "feature_size": 80,
        "sampling_rate": 16000,
        "hop_length": 160,
        "chunk_length": 30,
        "n_fft": 400,
    }

    @property
    def modalities(self) -> tuple[str, ...]:
        return ("audio",)

    @property
    def markers(self) -> dict[int, str]:
        return {} if self.is_source else {self.marker_id: "audio"}

    @property
    def rate(self) -> int:
        """Samples per second of what the model hears."""
        return int(self.settings["sampling_rate"])

    @staticmethod
    @abstractmethod
    def prepare(sound: Waveform, settings: Settings) -> Arrays:
        """Return what the encoder reads of a sound at the model's rate."""


class WhisperProcessor(AudioProcessor):
    """Fills up with silence to 30 seconds; nothing stands for that in the decoder's prompt."""

    is_source = True

    def __init__(self, config: Settings, settings: Settings, encode: Encode) -> None:
        super().__init__(config, settings, encode)
        self.num_positions = int(config.get("max_source_positions", 1500))
        own = self.settings
        frames = own["chunk_length"] * own["sampling_rate"] // own["hop_length"]
        if (frames + 1) // 2 != self.num_positions:
            raise BadCheckpoint(
                f"max_source_positions={self.num_positions}, but {own['chunk_length']} s of audio are "
                f"{frames} frames, two for each position (preprocessor_config.json)."
            )

    @staticmethod
    def prepare(sound: Waveform, settings: Settings) -> Arrays:
        """See AudioProcessor: [mels, frames] of `chunk_length` seconds. Raises RequestError."""
        return {"input_features": _heard(sound, settings, is_window=True)}

    def tokens(self, arrays: Mapping[str, np.ndarray]) -> list[int]:
        return [0] * self.num_positions


class Qwen2AudioProcessor(AudioProcessor):
    """Fills up with silence, but for the tokens of a sound it does not count."""

    DEFAULTS: ClassVar[Settings] = {**AudioProcessor.DEFAULTS, "feature_size": 128}

    def __init__(self, config: Settings, settings: Settings, encode: Encode) -> None:
        super().__init__(config, settings, encode)
        self.placeholder_id = self.marker_id = marker_of(config)

    @staticmethod
    def prepare(sound: Waveform, settings: Settings) -> Arrays:
        """See AudioProcessor: [mels, frames] of `chunk_length` seconds, and how many are of the sound."""
        num_frames = np.array([-(-len(sound) // settings["hop_length"])])
        return {"input_features": _heard(sound, settings, is_window=True), "num_frames": num_frames}

    def tokens(self, arrays: Mapping[str, np.ndarray]) -> list[int]:
        positions = (int(arrays["num_frames"][0]) - 1) // 2 + 1
        return [self.placeholder_id] * (positions // 2)


class OmniAudioProcessor(Qwen2AudioProcessor):
    """Hears a sound as long as it is."""

    @staticmethod
    def prepare(sound: Waveform, settings: Settings) -> Arrays:
        """See AudioProcessor: [mels, frames], all of the sound."""
        hop, size = settings["hop_length"], settings["n_fft"]
        count = -(-len(sound) // hop)
        padded = np.pad(sound, (0, count * hop - len(sound) + 2 * size))  # what is reflected there is silence
        mels = log_mel(padded, settings["sampling_rate"], settings["feature_size"], size, hop)
        return {"input_features": mels[:, :count].copy(), "num_frames": np.array([count])}


class VoxtralProcessor(Qwen2AudioProcessor):
    """Hears windows of 30 seconds, the last filled up with silence."""

    @staticmethod
    def prepare(sound: Waveform, settings: Settings) -> Arrays:
        """See AudioProcessor: [windows, mels, frames]."""
        mels = _heard(sound, settings, is_window=False)
        frames = settings["chunk_length"] * settings["sampling_rate"] // settings["hop_length"]
        return {"input_features": mels.reshape(len(mels), -1, frames).transpose(1, 0, 2).copy()}

    def tokens(self, arrays: Mapping[str, np.ndarray]) -> list[int]:
        audio = self.config["audio_config"]
        width = audio.get("intermediate_size", 5120) // audio.get("hidden_size", 1280)
        num_windows, _, frames = arrays["input_features"].shape
        return [self.placeholder_id] * (num_windows * frames // 2 // width)


def marker_of(config: Settings) -> int:
    """Return the token that stands for audio. Raises BadCheckpoint."""
    given = config.get("audio_token_id", config.get("audio_token_index"))
    if not isinstance(given, int):
        raise BadCheckpoint("The config does not name the token that stands for audio (audio_token_id).")
    return given


def _heard(sound: Waveform, settings: Settings, *, is_window: bool) -> np.ndarray:
    """Return the spectrogram of a sound, filled up to whole windows. Raises RequestError.

    is_window: one window has to do
    """
    rate, seconds = settings["sampling_rate"], settings["chunk_length"]
    if is_window and len(sound) > rate * seconds:
        raise RequestError(
            f"The audio lasts {len(sound) / rate:.1f} s; the model hears {seconds} s at a time: cut "
            "it, or send it to /v1/audio/transcriptions.",
            "multi_modal_data",
        )
    padded = np.pad(sound, (0, -len(sound) % (rate * seconds)))
    sizes = settings["feature_size"], settings["n_fft"], settings["hop_length"]
    return log_mel(padded, rate, *sizes)
