"""Whisper transcribes and translates speech: an encoder of spectrograms, and a decoder that reads it.

A source is the log-mel spectrogram of 30 seconds, [mels, frames]; two convolutions over time, the second of
every other frame, make its tokens (https://arxiv.org/abs/2212.04356).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.runtime.layers.build import BuildContext, leave_out
from octavo.runtime.models import encoder_decoder
from octavo.runtime.models.arch import Arch, Config, size_of
from octavo.runtime.models.audio_tower import AudioTower, audio_weights
from octavo.runtime.models.weights import WeightMap, to


@dataclass(frozen=True, kw_only=True)
class WhisperArch(encoder_decoder.SourceArch):
    """Adds the height of spectrograms."""

    num_mels: int = 80


class WhisperEncoder(AudioTower, encoder_decoder.SourceEncoder):
    """The tower of a whole Whisper."""

    def __init__(self, arch: encoder_decoder.SourceArch, build: BuildContext) -> None:
        assert isinstance(arch, WhisperArch)
        super().__init__(arch.encoder, build, arch.num_mels, arch.num_source_tokens)

    def encode(self, items: Sequence[encoder_decoder.Features]) -> list[Tensor]:
        """See SourceEncoder. items: with `input_features`, [mels, 2 * positions] float32"""
        return self.hear(torch.stack([item["input_features"] for item in items]))


class Whisper(encoder_decoder.EncoderDecoder):
    """Keys have no bias; the head is the token embedding."""

    ENCODER = WhisperEncoder
    WEIGHTS = WeightMap(
        {
            **audio_weights("encoder."),
            "decoder.embed_tokens": to("embed_tokens"),
            "decoder.embed_positions": to("embed_positions"),
            "decoder.layer_norm": to("norm"),
            "proj_out": to("lm_head"),
            **encoder_decoder.side_weights("decoder"),
        },
        prefix="model.",
    )

    def __init__(self, arch: Arch, build: BuildContext) -> None:
        super().__init__(arch, build)
        leave_out(self, (".qkv.bias", ".kv.bias"), "k")  # no softmax would notice

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        config = {"activation_function": "gelu"} | config
        return WhisperArch(
            **encoder_decoder.read_side(config, "decoder"),
            num_learned_positions=size_of(config, "max_target_positions", 448),
            encoder=Arch(**encoder_decoder.read_side(config, "encoder")),
            num_source_tokens=size_of(config, "max_source_positions", 1500),
            num_mels=size_of(config, "num_mel_bins", 80),
        )
