"""A `VisionTower` is the transformer over an image's patches, as CLIP and SigLIP have it."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from octavo.base.errors import BadCheckpoint
from octavo.runtime.batch import ForwardBatch
from octavo.runtime.layers.build import BuildContext
from octavo.runtime.layers.distance_bias import attend_to
from octavo.runtime.layers.embedding import Embedding
from octavo.runtime.layers.linear import ReplicatedLinear
from octavo.runtime.layers.mlp import make_activation
from octavo.runtime.layers.norm import NormArch, make_norm
from octavo.runtime.models.arch import (
    Arch,
    Config,
    LayerArch,
    read_arch,
    read_dense,
    read_heads,
    read_norm,
    size_of,
)
from octavo.runtime.models.decoder import DecoderLayer, Want
from octavo.runtime.models.weights import Target, qkv, to
from octavo.runtime.transfer import Array, Send, send

CLIP: Config = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "quick_gelu",
}
SIGLIP: Config = CLIP | {"patch_size": 16, "hidden_act": "gelu_pytorch_tanh"}
"""What transformers assumes where a vision_config is silent."""


@dataclass(frozen=True, kw_only=True)
class VisionArch:
    """A VisionArch describes a tower. body: its layers; patch_inputs: numbers of a patch

    num_positions: learned ones, with that of the class token
    """

    body: Arch
    patch_inputs: int
    num_positions: int = 0
    patch_bias: bool = True
    has_class_token: bool = False
    norm_in: bool = False
    norm_out: bool = True

    @property
    def size(self) -> int:
        """Return the width of hidden states."""
        return self.body.hidden_size

    def shortened(self, num_layers: int) -> "VisionArch":
        """Return the tower up to some layer, whose outputs no norm changes."""
        body = replace(self.body, layers=self.body.layers[:num_layers])
        return replace(self, body=body, norm_out=False)


def tower_body(
    config: Config, norm: NormArch, *, bias: bool = True, gated: bool = False, **heads: bool
) -> Arch:
    """Read the layers of a vision_config; heads: fields of their attention. Raises BadCheckpoint."""
    biases = {"qkv_bias": bias, "out_bias": bias} | heads
    return read_arch(
        {"vocab_size": 1} | config,
        attention=read_heads(config, is_causal=False, **biases),
        feed_forward=read_dense(config, bias=bias, gated=gated),
        rope=None,
        final_norm=False,
        norm=norm,
    )


def read_tower(config: Config, **own: Any) -> VisionArch:
    """Read a vision_config of CLIP or SigLIP. own: fields that the family replaces. Raises BadCheckpoint."""
    is_clip = config.get("model_type", "").startswith("clip")
    patch, image = size_of(config, "patch_size"), size_of(config, "image_size")
    body = tower_body(config, read_norm({"layer_norm_eps": 1e-5 if is_clip else 1e-6} | config))
    common: dict[str, Any] = {
        "patch_inputs": size_of(config, "num_channels", 3) * patch**2,
        "num_positions": (image // patch) ** 2 + is_clip,
        "patch_bias": not is_clip,
        "has_class_token": is_clip,
        "norm_in": is_clip,
    }
    return VisionArch(body=body, **common | own)


class VisionTower(nn.Module):
    """Computes embeddings of patches, then layers in which all patches of an image see each other."""

    def __init__(self, arch: VisionArch, build: BuildContext) -> None:
        super().__init__()
        body, size = arch.body, arch.size
        self._arch, self._dtype = arch, build.compute_dtype
        self.patches = ReplicatedLinear(build.at("patches"), arch.patch_inputs, size, arch.patch_bias)
        if arch.has_class_token:
            self.class_token = Embedding(build.at("class_token"), 1, size)
        if arch.num_positions:
            self.positions = Embedding(build.at("positions"), arch.num_positions, size)
        self.norm_in = make_norm(body.norm, build.at("norm_in"), size) if arch.norm_in else nn.Identity()
        self.norm_out = make_norm(body.norm, build.at("norm_out"), size) if arch.norm_out else nn.Identity()
        self.blocks = nn.ModuleList(
            DecoderLayer(body, build.at(f"blocks.{i}"), i, None) for i in range(len(body.layers))
        )

    def forward(
        self,
        patches: Tensor,
        send: Send,
        kept: Sequence[int] = (),
        positions: Tensor | None = None,
        seen: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states of N images of one size, [N, class token and patches, size].

        patches: [N, P, patch_inputs]; send: see ImageEncoder
        kept:    return those behind so many layers instead, side by side: [N, …, len(kept) * size]
        positions: numbers of learned positions, [P] or [N, P] int64; None = 0, 1, …
        seen:    [N, P] bool, what is attended to; None = all
        """
        num_images, num_patches, _ = patches.shape
        x = self.patches(patches.flatten(0, 1).to(self._dtype)).view(num_images, num_patches, -1)
        if self._arch.has_class_token:
            token = self.class_token(torch.zeros(num_images, dtype=torch.int64, device=x.device))
            x = torch.cat([token[:, None], x], dim=1)
        length = x.shape[1]
        if self._arch.num_positions:
            places = torch.arange(length, device=x.device) if positions is None else positions
            x = x + self.positions(places.flatten()).view(*places.shape, -1)
        batch = full_batch([length] * num_images, x.device, send)
        if seen is not None:
            attend_to(seen, batch)
        states = run_blocks(self.blocks, self.norm_in(x).flatten(0, 1), repeat(batch), kept)
        chosen = (
            torch.cat([states[index] for index in kept], -1)
            if kept
            else self.norm_out(states[len(self.blocks)])
        )
        return chosen.view(num_images, length, -1)


def run_blocks(
    blocks: nn.ModuleList, x: Tensor, batches: Iterable[ForwardBatch], kept: Collection[int] = ()
) -> dict[int, Tensor]:
    """Return the residual stream behind all layers and behind so many as in `kept`, [T, size], by how many.

    batches: of each layer
    """
    states: dict[int, Tensor] = {}
    residual: Tensor | None = None
    for index, (block, batch) in enumerate(zip(blocks, batches, strict=False)):
        seen: list[Tensor] | None = [] if index in kept else None
        x, residual = block(x, residual, batch, Want(inputs=seen))
        if seen is not None:
            [states[index]] = seen
    states[len(blocks)] = x if residual is None else residual + x
    return states


def full_batch(lengths: Sequence[int], device: torch.device, send: Send = send) -> ForwardBatch:
    """Return a batch of sequences, one after the other, for layers that keep nothing between steps."""
    return full_batches([lengths], device, send=send)[0][0]


def full_batches(
    many: Sequence[Sequence[int]], device: torch.device, *beside: Array, send: Send = send
) -> tuple[list[ForwardBatch], list[Tensor]]:
    """Return a full_batch of each list of lengths, and the arrays `beside` them, in one copy."""
    arrays = list(beside)
    for lengths in many:
        bounds, each = np.cumsum([0, *lengths]), np.asarray(lengths)
        counted = np.arange(bounds[-1]) - bounds[:-1].repeat(lengths)
        arrays += [counted, bounds, each, each.argsort(kind="stable")]
    sent = send(arrays, device)
    rest = iter(sent[len(beside) :])
    batches = [
        ForwardBatch(
            input_ids=positions,
            positions=positions,
            cu_q_lens=ends.int(),
            kv_lens=each.int(),
            kv_caches=[],
            groups=[],
            group_of_layer=[],
            from_start=True,
            longest_q=max(lengths),
            alike=_alike(lengths, order),
        )
        for lengths, positions, ends, each, order in zip(many, rest, rest, rest, rest, strict=True)
    ]
    return batches, sent[: len(beside)]


def _alike(lengths: Sequence[int], order: Tensor) -> list[tuple[int, int, Tensor]]:
    """Return Ragged.alike of whole sequences. order: where they stand, from the shortest to the longest"""
    sizes, counts = np.unique(lengths, return_counts=True)
    return list(zip(sizes.tolist(), sizes.tolist(), torch.split(order, counts.tolist()), strict=True))


def cut_patches(pixels: Tensor, size: int) -> Tensor:
    """Return the patches of images [N, C, H, W], row by row: [N, H / size * W / size, C * size * size]."""
    cut = pixels.unfold(2, size, size).unfold(3, size, size)
    return cut.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)


def resampled(pixels: Tensor, lines: Tensor, axis: int) -> Tensor:
    """Return pixels of uint8 resampled along an axis, to the bit as Pillow does it, by sums of integers.

    lines: [pixels along the axis, 1 + K] int32, the first that each sees and the weights of K, in 1 / 2^22
    """
    shape, last = [-1 if i == axis else 1 for i in range(pixels.ndim)], pixels.shape[axis] - 1
    first, total = lines[:, 0], torch.full((), 1 << 21, dtype=torch.int32, device=pixels.device)
    for number in range(lines.shape[1] - 1):
        seen = pixels.index_select(axis, (first + number).clamp(max=last))
        total = total + seen.int() * lines[:, 1 + number].view(shape)
    return (total >> 22).clamp(0, 255).byte()


class Projector(nn.Module):
    """Computes two linear layers with an activation between them."""

    def __init__(self, build: BuildContext, sizes: tuple[int, int, int], activation: str, bias: bool) -> None:
        super().__init__()
        self.up = ReplicatedLinear(build.at("up"), sizes[0], sizes[1], bias)
        self.down = ReplicatedLinear(build.at("down"), sizes[1], sizes[2], bias)
        self._activation = make_activation(activation, build.kernels.activate, gated=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [T, sizes[0]] to [T, sizes[2]]."""
        out: Tensor = self.down(self._activation(self.up(x)))
        return out


def flat(tensor: Any, layer: LayerArch | None) -> Any:
    """Turn the kernel of a convolution over patches to a matrix."""
    return tensor.flatten(1)


def row(tensor: Any, layer: LayerArch | None) -> Any:
    """Turn a vector to a table of one row."""
    return tensor.reshape(1, -1)


def tower_weights(prefix: str, tower: str = "encoder.tower.") -> dict[str, Target]:
    """Return the names of CLIP's and SigLIP's towers behind `prefix`, as transformers 5 and 4 have them."""
    block = f"{tower}blocks.*."
    names: dict[str, Target] = {}
    for start in (prefix, f"{prefix}vision_model."):
        layer = f"{start}encoder.layers.*."
        names |= {
            f"{start}embeddings.class_embedding": to(f"{tower}class_token.weight", "", row),
            f"{start}embeddings.patch_embedding.weight": to(f"{tower}patches.weight", "", flat),
            f"{start}embeddings.patch_embedding": to(f"{tower}patches"),
            f"{start}embeddings.position_embedding": to(f"{tower}positions"),
            f"{start}pre_layrnorm": to(f"{tower}norm_in"),
            f"{start}post_layernorm": to(f"{tower}norm_out"),
            f"{layer}layer_norm1": to(f"{block}attention_norm"),
            f"{layer}layer_norm2": to(f"{block}mlp_norm"),
            **qkv(f"{layer}self_attn.?_proj", f"{block}attention.qkv"),
            f"{layer}self_attn.out_proj": to(f"{block}attention.out"),
            f"{layer}mlp.fc1": to(f"{block}mlp.up"),
            f"{layer}mlp.fc2": to(f"{block}mlp.down"),
        }
    return names


def chosen_layers(config: Config, num_layers: int) -> list[int]:
    """Return after how many layers a LLaVA takes hidden states. Raises BadCheckpoint."""
    given = config.get("vision_feature_layer", -2)
    listed = given if isinstance(given, list) else [given]
    layers = [index + num_layers + 1 if index < 0 else index for index in listed]
    if not layers or not all(0 <= index <= num_layers for index in layers):
        raise BadCheckpoint(f"vision_feature_layer={given!r} is outside of the tower's {num_layers} layers")
    return layers
