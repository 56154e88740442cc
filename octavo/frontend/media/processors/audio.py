"""`AudioProcessor` says what a family makes of a sound; `WhisperProcessor`: of 30 s, for its encoder."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from octavo.base.errors import BadCheckpoint, RequestError
from octavo.frontend.media.audio import Waveform
from octavo.frontend.media.processors.media import Arrays, Encode, MediaProcessor, Settings
from octavo.frontend.media.spectrogram import log_mel


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
    """Fills up with silence."""

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
        rate, seconds = settings["sampling_rate"], settings["chunk_length"]
        if len(sound) > rate * seconds:
            raise RequestError(
                f"The audio lasts {len(sound) / rate:.1f} s; the model hears {seconds} s at a time: cut "
                "it, or send it to /v1/audio/transcriptions.",
                "multi_modal_data",
            )
        padded = np.pad(sound, (0, rate * seconds - len(sound)))
        sizes = settings["feature_size"], settings["n_fft"], settings["hop_length"]
        return {"input_features": log_mel(padded, rate, *sizes)}

    def tokens(self, arrays: Mapping[str, np.ndarray]) -> list[int]:
        return [0] * self.num_positions
