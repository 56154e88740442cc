"""A `Conformer` hears spectrograms by attention and convolutions (https://arxiv.org/abs/2005.08100)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from octavo.runtime.batch import ForwardBatch
from octavo.runtime.layers.affine import Affine
from octavo.runtime.layers.build import BuildContext
from octavo.runtime.layers.distance_bias import DistanceBias
from octavo.runtime.layers.linear import ReplicatedLinear
from octavo.runtime.layers.mlp import MLP
from octavo.runtime.layers.norm import make_norm
from octavo.runtime.layers.self_attention import AttentionSetting, SelfAttention
from octavo.runtime.models.arch import Config, LayerArch, expect, read_dense, read_heads, read_norm, size_of
from octavo.runtime.models.vision import flat, full_batch
from octavo.runtime.models.weights import Target, qkv, swap_halves, to

_USUAL: Config = {"hidden_size": 1024, "intermediate_size": 1536, "num_blocks": 24, "num_attention_heads": 16}
_USUAL |= {"kernel_size": 3, "input_size": 80, "nemo_conv_channels": 1024, "bias_max_distance": 1000}
"""What transformers assumes where an audio_config is silent."""
_LONGEST = 500
"""Positions that see each other; what is longer is heard in parts, the last filled up."""
_NORMS = ("mlp_in_norm", "attention_norm", "conv_norm", "mlp_out_norm", "norm")


class _Block(nn.Module):
    """Computes half an MLP, attention, a convolution over what came before, and the other half."""

    def __init__(self, audio: Config, build: BuildContext) -> None:
        super().__init__()
        size, self._kernel, norm = size_of(audio, "hidden_size"), size_of(audio, "kernel_size"), read_norm({})
        dense = read_dense({**audio, "activation": "silu"}, bias=True)
        heads = read_heads(audio, is_causal=False, qkv_bias=True, out_bias=True)
        for name in _NORMS:
            self.add_module(name, make_norm(norm, build.at(name), size))
        self.mlp_in, self.mlp_out = (MLP(dense, build.at(name), size) for name in ("mlp_in", "mlp_out"))
        self.attention = SelfAttention(heads, build.at("attention"), 0, size, AttentionSetting(norm))
        self.glu = ReplicatedLinear(build.at("glu"), size, 2 * size, bias=True)
        self.terms = Affine(build.at("terms"), (size,), _gated)
        self.depthwise = Affine(build.at("depthwise"), (size, 1, self._kernel), functional.conv1d)
        self.pointwise = ReplicatedLinear(build.at("pointwise"), size, size, bias=True)
        self.conv_out = ReplicatedLinear(build.at("conv_out"), size, size, bias=True)

    def forward(self, x: Tensor, batch: ForwardBatch, lengths: Sequence[int]) -> Tensor:
        """Map [T, size] to [T, size]. lengths: of the sequences"""
        normed = [self.get_submodule(name) for name in _NORMS]
        x = x + 0.5 * self.mlp_in(normed[0](x))
        x = x + self.attention(normed[1](x), batch)
        value = self.terms(self.glu(normed[2](x)))
        parts = [
            functional.pad(part.t()[None], (self._kernel - 1, 0))
            for part in torch.split(value, list(lengths))
        ]
        deep = torch.cat([self.depthwise(part, groups=value.shape[1])[0].t() for part in parts])
        x = x + self.conv_out(functional.silu(self.pointwise(deep)))
        out: Tensor = normed[4](x + 0.5 * self.mlp_out(normed[3](x)))
        return out


class Conformer(nn.Module):
    """Halves the time of a spectrogram three times, then computes its blocks."""

    def __init__(self, config: Config, build: BuildContext) -> None:
        """Read an audio_config. Raises BadCheckpoint, Unsupported."""
        super().__init__()
        audio = _USUAL | config
        self.size, mels = size_of(audio, "hidden_size"), size_of(audio, "input_size")
        self._dtype, channels = build.compute_dtype, size_of(audio, "nemo_conv_channels")
        kinds: Config = dict.fromkeys(("activation", "conv_activation", "conv_glu_type"), "swish")
        kinds |= {"ext_pw_out_channel": self.size, "depthwise_separable_out_channel": self.size}
        expect(audio, chunk_size=-1, bias_symmetric=False, depthwise_multiplier=1, downsample_rate=1)
        expect(audio, time_reduction=8, nemo_activation="relu", **kinds)
        self.normal = Affine(build.at("normal"), (mels,), lambda x, rate, mean: (x - mean) * rate)
        shapes = [(channels, 1, 3, 3), *[(channels, 1, 3, 3), (channels, channels, 1, 1)] * 2]
        self.convolutions = nn.ModuleList(
            Affine(build.at(f"convolutions.{i}"), shape, functional.conv2d) for i, shape in enumerate(shapes)
        )
        self.inputs = ReplicatedLinear(build.at("inputs"), channels * -(-mels // 8), self.size, bias=True)
        heads, most = size_of(audio, "num_attention_heads"), size_of(audio, "bias_max_distance")
        self.distances = DistanceBias(build.at("distances"), heads, most)
        count = size_of(audio, "num_blocks")
        self.blocks = nn.ModuleList(_Block(audio, build.at(f"blocks.{i}")) for i in range(count))

    def forward(self, spectrograms: Sequence[Tensor]) -> list[Tensor]:
        """Return the states of each, [frames / 8, size]. spectrograms: [frames, mels] float32"""
        states = [self._halved(frames) for frames in spectrograms]
        filled = [
            functional.pad(s, (0, 0, 0, -len(s) % _LONGEST if len(s) > _LONGEST else 0)) for s in states
        ]
        parts = [part for each in filled for part in torch.split(each, _LONGEST)]
        x, lengths = torch.cat(parts), [len(part) for part in parts]
        batch = full_batch(lengths, x.device)
        self.distances.add_to(batch)
        for block in self.blocks:
            x = block(x, batch, lengths)
        each_filled = torch.split(x, [len(each) for each in filled])
        return [part[: len(s)] for part, s in zip(each_filled, states, strict=True)]

    def _halved(self, frames: Tensor) -> Tensor:
        x = self.normal(frames).to(self._dtype)[None, None]
        for number, convolve in enumerate(self.convolutions):
            how = {} if number in (2, 4) else {"stride": 2, "padding": 1, "groups": x.shape[1]}
            x = convolve(x, **how)
            x = x if number in (1, 3) else functional.relu(x)
        out: Tensor = self.inputs(x[0].transpose(0, 1).flatten(1))
        return out


def _gated(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    value, gate = x.chunk(2, dim=1)
    return (value + first) * functional.silu(gate + second)


def _vector(tensor: Any, layer: LayerArch | None) -> Any:
    return tensor.flatten()


def conformer_weights(prefix: str, module: str) -> dict[str, Target]:
    """Return the names of transformers behind `prefix`, and those that Microsoft gave."""
    layer, block = f"{prefix}encoders.*.", f"{module}blocks.*."
    names = {
        f"{prefix}encoder_embedding.global_mean": to(f"{module}normal.bias"),
        f"{prefix}encoder_embedding.global_invstd": to(f"{module}normal.weight"),
        f"{prefix}embed.out": to(f"{module}inputs"),
        f"{prefix}relative_attention_bias_layer.bias_values": to(f"{module}distances.table"),
        f"{layer}layer_norm_att": to(f"{block}attention_norm"),
        f"{layer}layer_norm": to(f"{block}norm"),
        f"{layer}conv.layer_norm": to(f"{block}conv_norm"),
        **qkv(f"{layer}self_attn.linear_?", f"{block}attention.qkv"),
        **qkv(f"{layer}self_attn.?_proj", f"{block}attention.qkv"),
        f"{layer}self_attn.linear_out": to(f"{block}attention.out"),
        f"{layer}self_attn.o_proj": to(f"{block}attention.out"),
        f"{layer}conv.glu.b1": to(f"{block}terms.weight", "", _vector),
        f"{layer}conv.glu.b2": to(f"{block}terms.bias", "", _vector),
        f"{layer}conv.dw_sep_conv_1d.dw_conv": to(f"{block}depthwise"),
    }
    for number, place in enumerate((0, 2, 3, 5, 6)):
        names[f"{prefix}embed.conv.{place}"] = to(f"{module}convolutions.{number}")
    own = {"glu.ext_pw_conv_1d": "glu", "dw_sep_conv_1d.pw_conv": "pointwise", "ext_pw_conv_1d": "conv_out"}
    for theirs, ours in own.items():
        names[f"{layer}conv.{theirs}.weight"] = to(f"{block}{ours}.weight", "", flat)
        names[f"{layer}conv.{theirs}"] = to(f"{block}{ours}")
    for side in ("in", "out"):
        names[f"{layer}feed_forward_{side}.layer_norm"] = to(f"{block}mlp_{side}_norm")
        for up, down in (("net.*.linear", "net.*"), ("gate_up_proj", "down_proj")):
            names[f"{layer}feed_forward_{side}.{up}"] = to(f"{block}mlp_{side}.up", "", swap_halves)
            names[f"{layer}feed_forward_{side}.{down}"] = to(f"{block}mlp_{side}.down")
    return names
