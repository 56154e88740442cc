"""Phi-4 multimodal sees squares of an image by a SigLIP, and hears by a conformer.

Its adapters for images and speech are folders of their own beside the weights (LoRAConfig.default_mm_loras),
or among them, as config.phi4_multimodal says. Source: transformers' Phi4Multimodal.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from octavo.base.errors import BadCheckpoint, Unsupported
from octavo.runtime.layers.build import BuildContext
from octavo.runtime.layers.embedding import Embedding
from octavo.runtime.models import vision
from octavo.runtime.models.arch import Config, expect, size_of
from octavo.runtime.models.conformer import Conformer, conformer_weights
from octavo.runtime.models.idefics3 import SIGLIP_SO, positions_in_grid
from octavo.runtime.models.media import Features, ImageEncoder
from octavo.runtime.models.weights import Target, to
from octavo.runtime.transfer import Send

_VISION: Config = {"intermediate_size": 4304, "num_hidden_layers": 27, "image_size": 448, "patch_size": 14}
_IMAGE, _AUDIO = "embed_tokens_extend.image_embed.", "embed_tokens_extend.audio_embed."


def _projector(stem: str, module: str, names: str = "up down") -> dict[str, Target]:
    ours = zip(names.split(), ("up", "down"), strict=True)
    return {stem.replace("?", name): to(f"{module}.{own}") for name, own in ours}


_MICROSOFTS: dict[str, Target] = {
    **_projector(f"{_IMAGE}img_projection.?", "encoder.projector", "0 2"),
    f"{_IMAGE}glb_GN": to("encoder.between.weight", "", vision.row),
    f"{_IMAGE}sub_GN": to("encoder.newline.weight", "", vision.row),
    **_projector(f"{_AUDIO}audio_projection.speech.?", "encoder.speech", "0 2"),
    **_projector(f"{_AUDIO}audio_projection.vision.?", "encoder.speech_beside_images", "0 2"),
}
"""Names of the first files, where transformers has others."""


class Phi4MultimodalEncoder(ImageEncoder):
    """Reads `pixel_values`, [1 + squares, 3, side, side], and `grid`, or `input_features` of a sound.

    grid: rows and columns of squares, then of patches that are the image's; what fills up is not attended to
    """

    WEIGHTS: ClassVar = {
        **_MICROSOFTS,
        **vision.tower_weights(f"{_IMAGE}img_processor."),
        **_projector(f"{_IMAGE}img_projection_?", "encoder.projector"),
        f"{_IMAGE}global_img_feature_extensor": to("encoder.between.weight", "", vision.row),
        f"{_IMAGE}sub_img_feature_extensor": to("encoder.newline.weight", "", vision.row),
        **conformer_weights(f"{_AUDIO}encoder.", "encoder.ear."),
        **_projector(f"{_AUDIO}?_proj_for_speech", "encoder.speech"),
        **_projector(f"{_AUDIO}?_proj_for_vision_speech", "encoder.speech_beside_images"),
    }

    def __init__(self, config: Config, build: BuildContext) -> None:
        super().__init__(config, build)
        tower: Config = SIGLIP_SO | _VISION | config["vision_config"]
        arch = vision.read_tower(tower, patch_bias=True)
        patch, side = size_of(tower, "patch_size"), size_of(tower, "image_size")
        expect(tower, crop_size=side)
        self._patch_size, self._grid, self.side = patch, side // patch, side
        if self._grid % 2:
            raise Unsupported(f"{self._grid} patches in a row are odd: only even ones are supported.")
        self._layers = vision.chosen_layers(
            {"vision_feature_layer": tower.get("feature_layer", -2)}, len(arch.body.layers)
        )
        self.tower = vision.VisionTower(arch.shortened(self._layers[0]), build.at("tower"))
        self.between, self.newline = (
            Embedding(build.at(name), 1, arch.size) for name in ("between", "newline")
        )
        self.ear, size = Conformer(config["audio_config"], build.at("ear")), size_of(config, "hidden_size")
        self.projector, self.speech, self.speech_beside_images = (
            vision.Projector(build.at(name), (width, size, size), "gelu", True)
            for name, width in (
                ("projector", arch.size),
                ("speech", self.ear.size),
                ("speech_beside_images", self.ear.size),
            )
        )

    def unused(self) -> tuple[str, ...]:
        """See MediaEncoder: what follows the layer that is taken."""
        numbers = "|".join(map(str, range(len(self.tower.blocks))))
        adapters = r"\.lora_[AB]\.(vision|speech)\."
        return rf"img_processor\.(head|post_layernorm|encoder\.layers\.(?!({numbers})\.))", adapters

    def encode(self, items: Sequence[Features]) -> list[Tensor]:
        """See MediaEncoder: sounds beside images have a projector of their own."""
        images, sounds = [x for x in items if "grid" in x], [x for x in items if "grid" not in x]
        seen = iter(super().encode(images) if images else ())
        states = iter(self.ear([item["input_features"] for item in sounds]) if sounds else ())
        speech = self.speech, self.speech_beside_images
        return [
            next(seen) if "grid" in item else speech[int(item["is_beside_images"])](next(states))
            for item in items
        ]

    def see(self, items: Sequence[Features], send: Send) -> list[Tensor]:
        grids, side = [item["grid"].tolist() for item in items], self._grid
        pixels = torch.cat([item["pixel_values"] for item in items])
        if pixels.shape[-1] != side * self._patch_size:
            raise BadCheckpoint(f"Squares of {pixels.shape[-1]} are no {side} x {side} patches")
        sizes = list[tuple[int, int]]()
        for rows, columns, high, wide in grids:
            heights, widths = (
                [min(n - i * side, side) for i in range(k)] for n, k in ((high, rows), (wide, columns))
            )
            sizes += [(side, side), *((height, width) for height in heights for width in widths)]
        each = zip(*(self._places(*size) for size in sizes), strict=True)
        places, seen = send([torch.stack(one).numpy() for one in each], pixels.device)
        cut = vision.cut_patches(pixels, self._patch_size)
        hidden = self.tower(cut, send, self._layers, places, seen.bool())
        halved = functional.avg_pool2d(hidden.unflatten(1, (side, side)).permute(0, 3, 1, 2), 2)
        parts = torch.split(halved.permute(0, 2, 3, 1), [1 + grid[0] * grid[1] for grid in grids])
        made = [self._packed(part, *grid) for part, grid in zip(parts, grids, strict=True)]
        embeds: Tensor = self.projector(torch.cat(made))
        return list(torch.split(embeds, [len(each) for each in made]))

    def sample(self, numbers: int, device: torch.device) -> Features:
        made, side = super().sample(numbers, device), self._grid
        columns = len(made["pixel_values"]) - 1
        return {**made, "grid": torch.tensor([1, columns, side, columns * side])}

    def _places(self, high: int, wide: int) -> tuple[Tensor, Tensor]:
        """Return the learned positions of a square's patches, and which are the image's, [patches] each."""
        places = torch.zeros(self._grid, self._grid, dtype=torch.int64)
        places[:high, :wide] = positions_in_grid(high, self._grid, places.device, wide).view(high, wide)
        seen = torch.zeros_like(places, dtype=torch.bool)
        seen[:high, :wide] = True
        return places.flatten(), seen.flatten()

    def _packed(self, squares: Tensor, rows: int, columns: int, high: int, wide: int) -> Tensor:
        """Return the tokens of the squares together, row by row, and of the copy behind them."""
        zero = torch.zeros(1, dtype=torch.int64, device=squares.device)
        whole = (
            squares[1:].view(rows, columns, *squares.shape[1:]).transpose(1, 2).flatten(2, 3).flatten(0, 1)
        )
        whole, end = whole[: -(-high // 2), : -(-wide // 2)], self.newline(zero)
        lines = [torch.cat([x, end.expand(len(x), 1, -1)], 1).flatten(0, 1) for x in (whole, squares[0])]
        return torch.cat([lines[0], self.between(zero), lines[1]])
