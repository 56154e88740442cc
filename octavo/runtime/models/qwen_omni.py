"""Qwen2.5-Omni's thinker sees as Qwen2.5-VL does, and hears stretches of two seconds, each by itself."""

from collections.abc import Mapping, Sequence
from math import log
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from octavo.base.errors import Unsupported
from octavo.messages.media import EMBEDS
from octavo.runtime.layers.build import BuildContext, leave_out
from octavo.runtime.layers.linear import ReplicatedLinear
from octavo.runtime.models.arch import Arch, Config, size_of
from octavo.runtime.models.audio import make_tower
from octavo.runtime.models.audio_tower import AudioTower, audio_weights
from octavo.runtime.models.media import Features
from octavo.runtime.models.qwen_vl import Qwen25VLEncoder
from octavo.runtime.models.weights import Target, to
from octavo.runtime.transfer import Array

_AUDIO: Config = {
    "d_model": 1280,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "n_window": 100,
}
"""What transformers assumes where an audio_config is silent."""
_SEEN = dict(Qwen25VLEncoder.WEIGHTS)
_QKV: Target = _SEEN.pop("visual.blocks.*.attn.qkv")


class _Sinusoids(nn.Module):
    """Computes positions that no checkpoint has."""

    def __init__(self, num_positions: int, size: int, device: torch.device) -> None:
        super().__init__()
        rates = torch.exp(-log(10_000) / (size // 2 - 1) * torch.arange(size // 2).float())
        angles = torch.arange(num_positions)[:, None] * rates
        self._table = torch.cat([angles.sin(), angles.cos()], dim=1).to(device)

    def forward(self, positions: Tensor) -> Tensor:
        return self._table[positions]


class _Tower(AudioTower):
    def __init__(self, arch: Arch, build: BuildContext, num_mels: int, num_positions: int) -> None:
        super().__init__(arch, build, num_mels, num_positions)
        self.positions = _Sinusoids(num_positions, arch.hidden_size, build.device)


class OmniEncoder(Qwen25VLEncoder):
    """Reads what Qwen2.5-VL's encoder reads, or `input_features`, [mels, frames], of a sound."""

    WEIGHTS: ClassVar = {
        **_SEEN,
        **{f"visual.blocks.*.attn.{shard}": to(_QKV.module, shard) for shard in "qkv"},
        **audio_weights("audio_tower.", "encoder.ear."),
        "audio_tower.ln_post": to("encoder.ear.norm"),
        "audio_tower.proj": to("encoder.ear_projector"),
    }
    PREFIX: ClassVar[str] = "thinker.|"

    def __init__(self, config: Config, build: BuildContext) -> None:
        rate = {"tokens_per_second": config.get("position_id_per_seconds", 25)}
        super().__init__(config | {"vision_config": config["vision_config"] | rate}, build)
        audio: Config = _AUDIO | config["audio_config"]
        self.ear = make_tower(audio, build.at("ear"), _Tower)
        self._frames = 2 * size_of(audio, "n_window")
        if self._frames % 4:
            raise Unsupported(f"n_window={audio['n_window']} is odd: only even ones are supported.")
        size = size_of(config["text_config"], "hidden_size")
        self.ear_projector = ReplicatedLinear(build.at("ear_projector"), audio["d_model"], size, bias=True)
        leave_out(self.ear, (".qkv.bias",), "k")

    def unused(self) -> tuple[str, ...]:
        """See MediaEncoder: what speaks."""
        return r"^(talker|token2wav)\.", r"audio_bos_eos_token", r"positional_embedding"

    def encode(self, items: Sequence[Features]) -> list[Tensor]:
        heard = iter(self._hear([item["input_features"] for item in items if "input_features" in item]))
        rest = [item for item in items if "grid_thw" in item]
        seen = iter(super().encode(rest) if rest else ())
        return [next(seen if "grid_thw" in item else heard) for item in items]

    def _hear(self, mels: Sequence[Tensor]) -> list[Tensor]:
        if not mels:
            return []
        pieces = [torch.split(mel, self._frames, dim=1) for mel in mels]
        frames = [piece.shape[1] for each in pieces for piece in each]
        filled = [functional.pad(x, (0, self._frames - x.shape[1])) for each in pieces for x in each]
        lengths = [(count - 1) // 2 + 1 for count in frames]
        heard = self.ear.hear(torch.stack(filled), lengths, pooled=2, frames=frames)
        projected: Tensor = self.ear_projector(torch.cat(heard))
        return list(torch.split(projected, [_num_tokens(mel.shape[1]) for mel in mels]))

    def patch_positions(self, features: Mapping[str, Array]) -> list[Array]:
        """See MediaEncoder: a sound counts as text does."""
        if "grid_thw" in features:
            return super().patch_positions(features)
        given = features.get(EMBEDS)
        count = _num_tokens(int(features["num_frames"][0])) if given is None else len(given)
        return [np.broadcast_to(np.arange(count), (3, count))]


def _num_tokens(frames: int) -> int:
    return ((frames - 1) // 2 + 1) // 2
