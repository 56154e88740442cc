"""An `AudioTower` is the encoder of spectrograms that Whisper has, and those after it."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from octavo.runtime.layers.build import BuildContext
from octavo.runtime.layers.embedding import Embedding
from octavo.runtime.layers.linear import ReplicatedLinear
from octavo.runtime.layers.mlp import make_activation
from octavo.runtime.layers.norm import make_norm
from octavo.runtime.models.arch import Arch
from octavo.runtime.models.decoder import DecoderLayer
from octavo.runtime.models.encoder_decoder import run_encoder, side_weights
from octavo.runtime.models.vision import flat, full_batch
from octavo.runtime.models.weights import Target, to


class AudioTower(nn.Module):
    """Computes two convolutions, adds positions, then layers in which all frames see each other."""

    def __init__(self, arch: Arch, build: BuildContext, num_mels: int, num_positions: int) -> None:
        """arch: of its layers"""
        super().__init__()
        size, self._dtype = arch.hidden_size, build.compute_dtype
        self.conv1 = ReplicatedLinear(build.at("conv1"), 3 * num_mels, size, bias=True)
        self.conv2 = ReplicatedLinear(build.at("conv2"), 3 * size, size, bias=True)
        self.positions: nn.Module = Embedding(build.at("positions"), num_positions, size)
        self.blocks = nn.ModuleList(
            DecoderLayer(arch, build.at(f"blocks.{i}"), i, None) for i in range(len(arch.layers))
        )
        self.norm = make_norm(arch.norm, build.at("norm"), size)
        self._gelu = make_activation("gelu", build.kernels.activate, gated=False)

    def hear(
        self, mels: Tensor, lengths: Sequence[int] | None = None, pooled: int = 1, frames: Sequence[int] = ()
    ) -> list[Tensor]:
        """Return the hidden states of each spectrogram, [positions / pooled, size].

        mels: [N, mels, 2 * positions] float32; lengths: positions of each that are sound; None = all
        pooled: so many neighbours become their mean, before the norm; what is left over is dropped
        frames: of each spectrogram that are sound; the second convolution sees nothing behind them
        """
        x = self._convolve(self.conv1, mels.transpose(1, 2).to(self._dtype), 1)
        if frames:
            ends = torch.tensor(frames, device=x.device)[:, None]
            x = x * (torch.arange(x.shape[1], device=x.device) < ends)[..., None]
        x = self._convolve(self.conv2, x, 2)
        x = x + self.positions(torch.arange(x.shape[1], device=x.device)).to(x.dtype)
        lengths = [x.shape[1]] * len(x) if lengths is None else lengths
        kept = torch.cat([row[:length] for row, length in zip(x, lengths, strict=True)])
        states = run_encoder(self.blocks, kept, full_batch(lengths, x.device))
        hidden = torch.split(states, list(lengths))
        if pooled > 1:
            whole = (part[: len(part) // pooled * pooled] for part in hidden)
            hidden = tuple(part.view(len(part) // pooled, pooled, part.shape[1]).mean(1) for part in whole)
        return list(torch.split(self.norm(torch.cat(hidden)), [len(part) for part in hidden]))

    def _convolve(self, conv: ReplicatedLinear, x: Tensor, stride: int) -> Tensor:
        """Look at three frames at a time. x: [N, frames, inputs] → [N, frames / stride, size]"""
        windows = functional.pad(x, (0, 0, 1, 1)).unfold(1, 3, stride)
        out: Tensor = self._gelu(conv(windows.flatten(0, 1).flatten(1)))
        return out.view(len(x), windows.shape[1], -1)


def audio_weights(prefix: str, tower: str = "encoder.") -> dict[str, Target]:
    """Return the names of Whisper's encoder behind `prefix`."""
    layers = side_weights("encoder")
    return {
        f"{prefix}conv1.weight": to(f"{tower}conv1.weight", "", flat),
        f"{prefix}conv2.weight": to(f"{tower}conv2.weight", "", flat),
        f"{prefix}conv1": to(f"{tower}conv1"),
        f"{prefix}conv2": to(f"{tower}conv2"),
        f"{prefix}embed_positions": to(f"{tower}positions"),
        f"{prefix}layer_norm": to(f"{tower}norm"),
        **{
            prefix + name.removeprefix("encoder."): to(tower + module.removeprefix("encoder."), shard)
            for name, (module, shard, _) in layers.items()
        },
    }
