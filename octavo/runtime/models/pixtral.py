"""Pixtral's tower sees images of any proportions, by a rope of two axes; Mistral 3 merges its patches."""

from collections.abc import Sequence
from math import isqrt
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from octavo.base.errors import Unsupported
from octavo.runtime.layers.build import BuildContext
from octavo.runtime.layers.linear import ReplicatedLinear
from octavo.runtime.layers.norm import NormArch, make_norm
from octavo.runtime.layers.rotary import places_of
from octavo.runtime.models.arch import Config, size_of
from octavo.runtime.models.media import Features, ImageEncoder
from octavo.runtime.models.packed_vision import PackedTower
from octavo.runtime.models.vision import Projector, cut_patches, flat, full_batches, tower_body
from octavo.runtime.models.weights import qkv, to
from octavo.runtime.transfer import Send

_VISION: Config = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "patch_size": 16,
    "hidden_act": "gelu",
}
"""What transformers assumes where a vision_config is silent."""
_TOWER, _LAYER, _BLOCK = "vision_tower.", "vision_tower.transformer.layers.*.", "encoder.tower.blocks.*."


class PixtralTower(PackedTower):
    """Normalises the embeddings of patches first."""

    def __init__(self, config: Config, build: BuildContext) -> None:
        body = tower_body(config, NormArch(eps=1e-5), bias=False, gated=True)
        patch_size = size_of(config, "patch_size")
        num_inputs = size_of(config, "num_channels", 3) * patch_size**2
        super().__init__(body, config, build, num_inputs, bias=False, shares=False)
        self.patch_size = patch_size
        self.norm_in = make_norm(body.norm, build.at("norm_in"), self.size)

    def encode(self, images: Sequence[Tensor], send: Send) -> Tensor:
        """Return the hidden states of all patches, [P, size]. images: [1, 3, H, W] each"""
        cut = [cut_patches(image, self.patch_size)[0] for image in images]
        found = np.concatenate([places_of(*self.grid(image)) for image in images], axis=1)
        lengths = [len(patches) for patches in cut]
        batches, [places] = full_batches([lengths], images[0].device, found, send=send)
        x = self.norm_in(self.embed(torch.cat(cut)))
        hidden: Tensor = self(x, places, batches)[-1]
        return hidden

    def grid(self, image: Tensor) -> tuple[int, int]:
        """Return the rows and columns of an image's patches."""
        return image.shape[-2] // self.patch_size, image.shape[-1] // self.patch_size


class PixtralEncoder(ImageEncoder):
    """Reads `pixel_values`, [1, 3, H, W] of each image, H and W multiples of a patch."""

    WEIGHTS: ClassVar = {
        f"{_TOWER}patch_conv.weight": to("encoder.tower.patches.weight", "", flat),
        f"{_TOWER}ln_pre": to("encoder.tower.norm_in"),
        f"{_LAYER}attention_norm": to(f"{_BLOCK}attention_norm"),
        f"{_LAYER}ffn_norm": to(f"{_BLOCK}mlp_norm"),
        **qkv(f"{_LAYER}attention.?_proj", f"{_BLOCK}attention.qkv"),
        f"{_LAYER}attention.o_proj": to(f"{_BLOCK}attention.out"),
        f"{_LAYER}feed_forward.gate_proj": to(f"{_BLOCK}mlp.up", "gate"),
        f"{_LAYER}feed_forward.up_proj": to(f"{_BLOCK}mlp.up", "up"),
        f"{_LAYER}feed_forward.down_proj": to(f"{_BLOCK}mlp.down"),
        "multi_modal_projector.linear_1": to("encoder.projector.up"),
        "multi_modal_projector.linear_2": to("encoder.projector.down"),
    }
    BIAS: ClassVar[bool] = True
    """Of the projector, where a config is silent."""

    def __init__(self, config: Config, build: BuildContext) -> None:
        super().__init__(config, build)
        if config.get("vision_feature_layer", -1) != -1:
            raise Unsupported(f"vision_feature_layer={config['vision_feature_layer']}: only -1 is supported.")
        self.tower = PixtralTower(_VISION | config["vision_config"], build.at("tower"))
        size = size_of(config["text_config"], "hidden_size")
        self.projector = Projector(
            build.at("projector"),
            (self.tower.size, size, size),
            config.get("projector_hidden_act", "gelu"),
            bool(config.get("multimodal_projector_bias", self.BIAS)),
        )

    def see(self, items: Sequence[Features], send: Send) -> list[Tensor]:
        images = [item["pixel_values"] for item in items]
        grids = [self.tower.grid(image) for image in images]
        parts = torch.split(self.tower.encode(images, send), [rows * columns for rows, columns in grids])
        merged = self._merged(parts, grids)
        return list(torch.split(self.projector(torch.cat(merged)), [len(part) for part in merged]))

    def sample(self, numbers: int, device: torch.device) -> Features:
        unit = 2 * self.tower.patch_size
        self.side = max(1, isqrt(numbers // 3) // unit) * unit
        return super().sample(numbers, device)

    def _merged(self, parts: Sequence[Tensor], grids: Sequence[tuple[int, int]]) -> list[Tensor]:
        return list(parts)


class Mistral3Encoder(PixtralEncoder):
    """Mistral 3 normalises patches and merges squares of them."""

    WEIGHTS: ClassVar = PixtralEncoder.WEIGHTS | {
        "multi_modal_projector.norm": to("encoder.norm"),
        "multi_modal_projector.patch_merger.merging_layer": to("encoder.merger"),
    }
    BIAS = False

    def __init__(self, config: Config, build: BuildContext) -> None:
        super().__init__(config, build)
        size, self._merge = self.tower.size, size_of(config, "spatial_merge_size", 2)
        norm = NormArch(eps=config["text_config"].get("rms_norm_eps") or 1e-6)
        self.norm = make_norm(norm, build.at("norm"), size)
        self.merger = ReplicatedLinear(build.at("merger"), size * self._merge**2, size, False)

    def _merged(self, parts: Sequence[Tensor], grids: Sequence[tuple[int, int]]) -> list[Tensor]:
        squares = []
        for part, (rows, columns) in zip(parts, grids, strict=True):
            grid = self.norm(part).view(1, rows, columns, -1).permute(0, 3, 1, 2)
            squares.append(functional.unfold(grid, self._merge, stride=self._merge)[0].t())
        merged: Tensor = self.merger(torch.cat(squares))
        return list(torch.split(merged, [len(square) for square in squares]))
