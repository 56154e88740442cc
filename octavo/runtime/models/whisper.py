"""Whisper transcribes and translates speech: an encoder of spectrograms, and a decoder that reads it.

A source is the log-mel spectrogram of 30 seconds, [mels, frames]; two convolutions over time, the second of
every other frame, make its tokens (https://arxiv.org/abs/2212.04356).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from octavo.runtime.layers.build import BuildContext, leave_out
from octavo.runtime.layers.embedding import Embedding
from octavo.runtime.layers.linear import ReplicatedLinear
from octavo.runtime.layers.mlp import make_activation
from octavo.runtime.layers.norm import make_norm
from octavo.runtime.models.arch import Arch, Config, size_of
from octavo.runtime.models.decoder import DecoderLayer
from octavo.runtime.models.encoder_decoder import (
    EncoderDecoder,
    Features,
    SourceArch,
    SourceEncoder,
    read_side,
    run_blocks,
    side_weights,
)
from octavo.runtime.models.vision import flat, full_batch
from octavo.runtime.models.weights import WeightMap, to


class AudioTower(SourceEncoder):
    """Computes two convolutions, adds positions, then layers in which all frames see each other."""

    def __init__(self, arch: Arch, build: BuildContext, num_mels: int, num_positions: int) -> None:
        """arch: of its layers"""
        super().__init__()
        size, self._num_positions, self._dtype = arch.hidden_size, num_positions, build.compute_dtype
        self.conv1 = ReplicatedLinear(build.at("conv1"), 3 * num_mels, size, bias=True)
        self.conv2 = ReplicatedLinear(build.at("conv2"), 3 * size, size, bias=True)
        self.positions = Embedding(build.at("positions"), num_positions, size)
        self.blocks = nn.ModuleList(
            DecoderLayer(arch, build.at(f"blocks.{i}"), i, None) for i in range(len(arch.layers))
        )
        self.norm = make_norm(arch.norm, build.at("norm"), size)
        self._gelu = make_activation("gelu", build.kernels.activate, gated=False)

    def encode(self, items: Sequence[Features]) -> list[Tensor]:
        """See SourceEncoder. items: with `input_features`, [mels, 2 * positions] float32"""
        x = torch.stack([item["input_features"] for item in items]).transpose(1, 2).to(self._dtype)
        x = self._convolve(self.conv1, x, 1)
        x = self._convolve(self.conv2, x, 2)
        count, length, _ = x.shape
        places = torch.arange(length, device=x.device)
        x = (x + self.positions(places)).flatten(0, 1)
        hidden = self.norm(run_blocks(self.blocks, x, full_batch([length] * count, x.device)))
        return list(hidden.view(count, length, -1))

    def _convolve(self, conv: ReplicatedLinear, x: Tensor, stride: int) -> Tensor:
        """Look at three frames at a time. x: [N, frames, inputs] → [N, frames / stride, size]"""
        windows = functional.pad(x, (0, 0, 1, 1)).unfold(1, 3, stride)
        out: Tensor = self._gelu(conv(windows.flatten(0, 1).flatten(1)))
        return out.view(len(x), windows.shape[1], -1)


@dataclass(frozen=True, kw_only=True)
class WhisperArch(SourceArch):
    """Adds the height of spectrograms."""

    num_mels: int = 80


class WhisperEncoder(AudioTower):
    """The tower of a whole Whisper."""

    def __init__(self, arch: SourceArch, build: BuildContext) -> None:
        assert isinstance(arch, WhisperArch)
        super().__init__(arch.encoder, build, arch.num_mels, arch.num_source_tokens)


class Whisper(EncoderDecoder):
    """Keys have no bias; the head is the token embedding."""

    ENCODER = WhisperEncoder
    WEIGHTS = WeightMap(
        {
            "encoder.conv1.weight": to("encoder.conv1.weight", "", flat),
            "encoder.conv2.weight": to("encoder.conv2.weight", "", flat),
            "encoder.conv1": to("encoder.conv1"),
            "encoder.conv2": to("encoder.conv2"),
            "encoder.embed_positions": to("encoder.positions"),
            "encoder.layer_norm": to("encoder.norm"),
            "decoder.embed_tokens": to("embed_tokens"),
            "decoder.embed_positions": to("embed_positions"),
            "decoder.layer_norm": to("norm"),
            "proj_out": to("lm_head"),
            **side_weights("encoder"),
            **side_weights("decoder"),
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
            **read_side(config, "decoder"),
            num_learned_positions=size_of(config, "max_target_positions", 448),
            encoder=Arch(**read_side(config, "encoder")),
            num_source_tokens=size_of(config, "max_source_positions", 1500),
            num_mels=size_of(config, "num_mel_bins", 80),
        )
