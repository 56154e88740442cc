"""Qwen2-Audio and Voxtral: text models that hear, by Whisper's encoder and a projector."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from octavo.runtime.layers.build import BuildContext, leave_out
from octavo.runtime.layers.linear import ReplicatedLinear
from octavo.runtime.layers.mlp import make_activation
from octavo.runtime.models.arch import Arch, Config, size_of
from octavo.runtime.models.audio_tower import AudioTower, audio_weights
from octavo.runtime.models.encoder_decoder import read_side
from octavo.runtime.models.media import Features, MediaEncoder
from octavo.runtime.models.weights import Target, to

_USUAL = {
    "d_model": "hidden_size",
    "encoder_layers": "num_hidden_layers",
    "encoder_attention_heads": "num_attention_heads",
    "encoder_ffn_dim": "intermediate_size",
}
"""Names of sizes in Whisper's configs, and elsewhere."""


def make_tower(config: Config, build: BuildContext, kind: type[AudioTower] = AudioTower) -> AudioTower:
    """Return the encoder that an audio_config describes."""
    usual = {name: config[other] for name, other in _USUAL.items() if other in config}
    arch = Arch(**read_side({"activation_function": "gelu", "vocab_size": 1} | usual | config, "encoder"))
    sizes = size_of(config, "num_mel_bins", 128), size_of(config, "max_source_positions", 1500)
    return kind(arch, build, *sizes)


class Qwen2AudioEncoder(MediaEncoder):
    """Pairs of positions are averaged; silence behind a sound is not heard."""

    WEIGHTS: ClassVar[Mapping[str, Target]] = {
        **audio_weights("audio_tower.", "encoder.tower."),
        "multi_modal_projector.linear": to("encoder.projector"),
    }

    def __init__(self, config: Config, build: BuildContext) -> None:
        super().__init__(config, build)
        audio: Config = config["audio_config"]
        self.tower = make_tower(audio, build.at("tower"))
        size = size_of(config["text_config"], "hidden_size", 4096)
        self.projector = ReplicatedLinear(build.at("projector"), audio["d_model"], size, bias=True)
        leave_out(self.tower, (".qkv.bias", ".kv.bias"), "k")

    def encode(self, items: Sequence[Features]) -> list[Tensor]:
        """See MediaEncoder. items: `input_features` [mels, frames], `num_frames` [1] that are sound"""
        lengths = [(int(item["num_frames"]) - 1) // 2 + 1 for item in items]
        heard = self.tower.hear(torch.stack([item["input_features"] for item in items]), lengths, pooled=2)
        projected: Tensor = self.projector(torch.cat(heard))
        return list(torch.split(projected, [len(part) for part in heard]))


class VoxtralEncoder(MediaEncoder):
    """Hears windows of 30 seconds, each apart; four positions side by side become one."""

    WEIGHTS: ClassVar[Mapping[str, Target]] = {
        **audio_weights("audio_tower.", "encoder.tower."),
        "multi_modal_projector.linear_1": to("encoder.up"),
        "multi_modal_projector.linear_2": to("encoder.down"),
    }

    def __init__(self, config: Config, build: BuildContext) -> None:
        super().__init__(config, build)
        audio: Config = config["audio_config"]
        self.tower, size = (
            make_tower(audio, build.at("tower")),
            size_of(config["text_config"], "hidden_size", 4096),
        )
        self._width = size_of(audio, "intermediate_size", 5120)
        self.up = ReplicatedLinear(build.at("up"), self._width, size, bias=False)
        self.down = ReplicatedLinear(build.at("down"), size, size, bias=False)
        name, kernel = config.get("projector_hidden_act", "gelu"), build.kernels.activate
        self._activation: Any = make_activation(name, kernel, gated=False)
        leave_out(self.tower, (".qkv.bias", ".kv.bias"), "k")

    def encode(self, items: Sequence[Features]) -> list[Tensor]:
        """See MediaEncoder. items: `input_features` [windows, mels, frames]"""
        heard = self.tower.hear(torch.cat([item["input_features"] for item in items]))
        joined = torch.cat(heard).reshape(-1, self._width)
        projected: Tensor = self.down(self._activation(self.up(joined)))
        per_window = len(projected) // len(heard)
        return list(torch.split(projected, [len(item["input_features"]) * per_window for item in items]))
