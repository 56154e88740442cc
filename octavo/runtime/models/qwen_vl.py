"""Qwen2-VL, 2.5-VL and 3-VL merge squares of patches of images and of pairs of a video's frames.

2.5 lets most layers see windows of an image only. 3 has learned positions beside the rope, and gives what
inner layers see to the first layers of the text model (deepstack).
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import isqrt, prod
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from octavo.base.errors import Unsupported
from octavo.runtime.batch import ForwardBatch
from octavo.runtime.layers.build import BuildContext
from octavo.runtime.layers.embedding import Embedding
from octavo.runtime.layers.norm import NormArch, make_norm
from octavo.runtime.layers.rotary import KNOWN_GRIDS, places_of
from octavo.runtime.models.arch import Config, LayerArch, size_of
from octavo.runtime.models.experts import stacked_by_inputs
from octavo.runtime.models.media import Features, ImageEncoder
from octavo.runtime.models.packed_vision import PackedTower
from octavo.runtime.models.vision import Projector, flat, full_batches, resampled, tower_body
from octavo.runtime.models.weights import Target, qkv, to
from octavo.runtime.transfer import Array, Send

Grid = tuple[int, int, int]
"""Times, rows and columns of patches."""
Plan = tuple[list[ForwardBatch], list[Tensor]]
"""Whose patches see each other, and where they are."""
_COMMON: Config = {
    "depth": 32,
    "num_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_BLOCK, _OURS = "visual.blocks.*.", "encoder.tower.blocks.*."


_UNIT = 64
"""Rows of Qwen 2.5's feed-forward blocks are filled up to multiples: GPUs read 3,420 numbers slowly."""


def _filled_rows(tensor: Any, layer: LayerArch | None) -> Any:
    """Add rows of zeros, which change nothing, to a multiple of _UNIT."""
    return functional.pad(tensor, (*[0, 0] * (tensor.ndim - 1), 0, -len(tensor) % _UNIT))


def _filled_columns(tensor: Any, layer: LayerArch | None) -> Any:
    """Add columns of zeros, to meet those rows; a bias has none."""
    return functional.pad(tensor, (0, -tensor.shape[1] % _UNIT)) if tensor.ndim == 2 else tensor


def _weights(up: Mapping[str, str], down: str, merger: Sequence[str], *, fills: bool) -> dict[str, Target]:
    """Return the names of a generation: of its feed-forward blocks, and its merger's norm and two layers."""
    rows, columns = (_filled_rows, _filled_columns) if fills else (None, None)
    return {
        "visual.patch_embed.proj.weight": to("encoder.tower.patches.weight", "", flat),
        "visual.patch_embed.proj": to("encoder.tower.patches"),
        f"{_BLOCK}norm1": to(f"{_OURS}attention_norm"),
        f"{_BLOCK}norm2": to(f"{_OURS}mlp_norm"),
        f"{_BLOCK}attn.qkv": to(f"{_OURS}attention.qkv"),
        **qkv(f"{_BLOCK}attn.?", f"{_OURS}attention.qkv"),  # of mmproj files
        f"{_BLOCK}attn.proj": to(f"{_OURS}attention.out"),
        **{f"{_BLOCK}mlp.{name}": to(f"{_OURS}mlp.up", shard, rows) for name, shard in up.items()},
        f"{_BLOCK}mlp.{down}": to(f"{_OURS}mlp.down", "", columns),
        f"visual.merger.{merger[0]}": to("encoder.norm"),
        f"visual.merger.{merger[1]}": to("encoder.projector.up"),
        f"visual.merger.{merger[2]}": to("encoder.projector.down"),
    }


class Qwen2VLEncoder(ImageEncoder):
    """Reads `pixel_values`, [P, 3, of one frame or a pair], and `grid_thw`, [3]; `seconds` of videos."""

    WEIGHTS: ClassVar = _weights({"fc1": ""}, "fc2", ("ln_q", "mlp.0", "mlp.2"), fills=False)
    DEFAULTS: ClassVar[Config] = _COMMON | {"hidden_size": 1280, "mlp_ratio": 4, "hidden_act": "quick_gelu"}
    """What transformers assumes where a vision_config is silent."""
    NORM: ClassVar = NormArch(kind="layer", bias=True, eps=1e-6)
    GATED: ClassVar[bool] = False
    HAS_BIAS: ClassVar[bool] = False
    """Of the embedding of patches."""
    has_patch_positions: ClassVar[bool] = True

    def __init__(self, config: Config, build: BuildContext) -> None:
        super().__init__(config, build)
        vision = self.vision = self.DEFAULTS | self.read_sizes(config["vision_config"])
        vision |= {"num_hidden_layers": vision["depth"], "num_attention_heads": vision["num_heads"]}
        self._merge, patch = size_of(vision, "spatial_merge_size"), size_of(vision, "patch_size") ** 2
        patch *= size_of(vision, "in_channels", 3) * size_of(vision, "temporal_patch_size")
        body = tower_body(vision, self.NORM, gated=self.GATED)
        place = build.at("tower")
        self.tower = PackedTower(body, vision, place, patch, bias=self.HAS_BIAS, shares=True)
        self.norm: nn.Module = make_norm(self.NORM, build.at("norm"), body.hidden_size)
        self._size = size_of(config["text_config"], "hidden_size")
        self.projector = self.merger(build.at("projector"))

    @staticmethod
    def read_sizes(vision: Config) -> Config:
        """Return a vision_config in which hidden_size is that of the tower."""
        size = vision.get("embed_dim", 1280)
        return vision | {"hidden_size": size, "intermediate_size": int(size * vision.get("mlp_ratio", 4))}

    def merger(self, build: BuildContext) -> Projector:
        """Return two layers over the patches of a square."""
        joined = self.tower.size * self._merge**2
        return Projector(build, (joined, joined, self._size), "gelu", True)

    def see(self, items: Sequence[Features], send: Send) -> list[Tensor]:
        plan = self.lay_out([_grid(item) for item in items], items[0]["levels"].device, send)
        pair, area = size_of(self.vision, "temporal_patch_size"), size_of(self.vision, "patch_size") ** 2
        frames = [x.view(*x.shape[:2], -1, area) for x in (item["pixel_values"] for item in items)]
        patches = [each.expand(-1, -1, pair, -1) for each in frames]
        embeds = self.project(torch.cat(patches).flatten(1), *plan)
        return list(torch.split(embeds, [prod(_grid(item)) // self._merge**2 for item in items]))

    def pixels(self, item: Features) -> Features:
        """See MediaEncoder: resampled, then cut into patches, square by square."""
        if "picture" not in item:
            return item
        picture, (_, rows, columns) = item["picture"], _grid(item)
        passes = (("columns", 1), ("rows", 0))
        for name, axis in reversed(passes) if int(item["is_height_first"]) else passes:
            picture = resampled(picture, item[name], axis)
        merge, side = self._merge, size_of(self.vision, "patch_size")
        cut = picture.view(rows // merge, merge, side, columns // merge, merge, side, 3)
        return {
            **item,
            "pixel_values": cut.permute(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, 3, side * side),
        }

    def sample(self, numbers: int, device: torch.device) -> Features:
        area = 3 * size_of(self.vision, "patch_size") ** 2
        side = isqrt(numbers // area) // self._merge * self._merge
        pixels = torch.zeros(side * side, 3, area // 3, dtype=torch.uint8, device=device)
        levels = torch.zeros(3, 256, device=device)
        return {"pixel_values": pixels, "levels": levels, "grid_thw": torch.tensor([1, side, side])}

    def lay_out(self, grids: Sequence[Grid], device: torch.device, send: Send) -> Plan:
        """Return what `project` needs to know of patches."""
        return full_batches([frames_of(grids)], device, self.places(grids), send=send)

    def project(self, patches: Tensor, batches: Sequence[ForwardBatch], beside: Sequence[Tensor]) -> Tensor:
        """Return the embeddings of all items, [squares, hidden_size]. batches, beside: the plan"""
        return self.joined(self.tower(self.tower.embed(patches), *beside, batches)[-1])

    def joined(self, states: Tensor) -> Tensor:
        """Map [P, size of the tower] to [squares, hidden_size]."""
        out: Tensor = self.projector(self.norm(states).view(-1, self.tower.size * self._merge**2))
        return out

    def places(self, grids: Sequence[Grid]) -> Array:
        """Return row and column of each patch, [2, P]."""
        return np.concatenate([places_of(h, w, self._merge) for t, h, w in grids for _ in range(t)], axis=1)

    def patch_positions(self, features: Mapping[str, Array]) -> list[Array]:
        """See MediaEncoder: a square has its time, its row and its column."""
        times, rows, columns = features["grid_thw"].tolist()
        shape = times, rows // self._merge, columns // self._merge
        positions = np.indices(shape).reshape(3, -1)
        return self.timed(positions, features)

    def timed(self, positions: Array, features: Mapping[str, Array]) -> list[Array]:
        """Return the runs of placeholders with these positions, [3, squares]."""
        return [positions]


class ColQwen2Encoder(Qwen2VLEncoder):
    """Sees for a model whose results are vectors of its tokens."""

    PREFIX: ClassVar[str] = "vlm.|"


class Qwen25VLEncoder(Qwen2VLEncoder):
    """Counts a video's time in fractions of seconds."""

    WEIGHTS: ClassVar = _weights(
        {"gate_proj": "gate", "up_proj": "up"}, "down_proj", ("ln_q", "mlp.0", "mlp.2"), fills=True
    )
    DEFAULTS: ClassVar[Config] = _COMMON | {
        "hidden_size": 3584,
        "intermediate_size": 3420,
        "hidden_act": "silu",
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 4,
    }
    NORM: ClassVar = NormArch(eps=1e-6)
    GATED: ClassVar[bool] = True

    @staticmethod
    def read_sizes(vision: Config) -> Config:
        """Return a vision_config whose feed-forward blocks are filled up."""
        size = size_of(vision, "intermediate_size", 3420)
        return vision | {"intermediate_size": size + -size % _UNIT}

    def lay_out(self, grids: Sequence[Grid], device: torch.device, send: Send) -> Plan:
        """Put squares into the order of windows."""
        vision, unit = self.vision, self._merge**2
        side = size_of(vision, "window_size") // self._merge // size_of(vision, "patch_size")
        order, windows = by_windows([(t, h // self._merge, w // self._merge) for t, h, w in grids], side)
        rows = (order[:, None] * unit + np.arange(unit)).ravel()
        beside, lengths = (self.places(grids)[:, rows], rows, order.argsort()), (unit * windows).tolist()
        return full_batches([frames_of(grids), lengths], device, *beside, send=send)

    def project(self, patches: Tensor, batches: Sequence[ForwardBatch], beside: Sequence[Tensor]) -> Tensor:
        """Compute squares window by window, then put them back."""
        (places, numbers, back), whole = beside, self.vision["fullatt_block_indexes"].__contains__
        return self.joined(self.tower(self.tower.embed(patches[numbers]), places, batches, whole)[-1])[back]

    def timed(self, positions: Array, features: Mapping[str, Array]) -> list[Array]:
        if "seconds" in features:
            step = self.vision["tokens_per_second"] * float(features["seconds"][0])
            positions[0] = (positions[0].astype(np.float32) * np.float32(step)).astype(np.int64)
        return [positions]


class Qwen3VLEncoder(Qwen2VLEncoder):
    """Each pair of frames stands for itself, behind its time as text."""

    WEIGHTS: ClassVar = _weights(
        {"linear_fc1": ""}, "linear_fc2", ("norm", "linear_fc1", "linear_fc2"), fills=False
    ) | {
        "visual.pos_embed": to("encoder.positions"),
        "visual.deepstack_merger_list.*.norm": to("encoder.deep_norms.*"),
        "visual.deepstack_merger_list.*.linear_fc1": to("encoder.deep_projectors.*.up"),
        "visual.deepstack_merger_list.*.linear_fc2": to("encoder.deep_projectors.*.down"),
    }
    DEFAULTS: ClassVar[Config] = _COMMON | {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "hidden_act": "gelu_pytorch_tanh",
        "patch_size": 16,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
    }
    HAS_BIAS: ClassVar[bool] = True
    read_sizes = staticmethod(lambda vision: vision)

    def __init__(self, config: Config, build: BuildContext) -> None:
        super().__init__(config, build)
        count = size_of(self.vision, "num_position_embeddings")
        self._side = round(count**0.5)
        self.positions = Embedding(build.at("positions"), count, self.tower.size)
        self._deep: list[int] = list(self.vision["deepstack_visual_indexes"])
        self.num_deep_layers = len(self._deep)
        own, count = build.parallel.layers or range(0), len(self._deep)
        inner = range(1, count)
        if count >= size_of(config["text_config"], "num_hidden_layers") or {own.start, own.stop} & {*inner}:
            raise Unsupported(
                f"The first {count} layers, which get what the tower saw, must be in one stage."
            )
        joined = self.tower.size * self._merge**2
        self.deep_norms = nn.ModuleList(
            make_norm(self.NORM, build.at(f"deep_norms.{i}"), joined) for i in range(len(self._deep))
        )
        self.deep_projectors = nn.ModuleList(
            self.merger(build.at(f"deep_projectors.{i}")) for i in range(len(self._deep))
        )

    def lay_out(self, grids: Sequence[Grid], device: torch.device, send: Send) -> Plan:
        """Find the learned positions around patches."""
        found = [corners_of(h, w, self._merge, self._side) for t, h, w in grids for _ in range(t)]
        corners, weights = (np.concatenate(each, axis=1) for each in zip(*found, strict=True))
        beside = self.places(grids), corners, weights.view(np.int64)
        return full_batches([frames_of(grids)], device, *beside, send=send)

    def project(self, patches: Tensor, batches: Sequence[ForwardBatch], beside: Sequence[Tensor]) -> Tensor:
        """Return the embeddings, and beside them what the first layers of the text add."""
        x, (places, numbers, shares) = self.tower.embed(patches), beside
        weighted = self.positions(numbers.flatten()) * shares.view(torch.float64).to(x).view(-1, 1)
        x, kept = x + weighted.unflatten(0, (4, -1)).sum(dim=0), [index + 1 for index in self._deep]
        *deep, last = self.tower(x, places, batches, kept=kept)
        joined = [states.view(-1, self.tower.size * self._merge**2) for states in deep]
        layers = zip(joined, self.deep_norms, self.deep_projectors, strict=True)
        return torch.cat([self.joined(last), *(up(norm(part)) for part, norm, up in layers)], dim=-1)

    def timed(self, positions: Array, features: Mapping[str, Array]) -> list[Array]:
        times = int(features["grid_thw"][0])
        positions[0] = 0
        return np.split(positions, times, axis=1)


class Qwen3VLMoEEncoder(Qwen3VLEncoder):
    """The experts of its text model are stored in a way of their own."""

    WEIGHTS: ClassVar = Qwen3VLEncoder.WEIGHTS | stacked_by_inputs()


def _grid(item: Features) -> Grid:
    times, rows, columns = item["grid_thw"].tolist()
    return times, rows, columns


def frames_of(grids: Sequence[Grid]) -> list[int]:
    """Return the patches of each pair of frames, which see each other."""
    return [h * w for t, h, w in grids for _ in range(t)]


def by_windows(grids: Sequence[Grid], side: int) -> tuple[Array, Array]:
    """Return the numbers of squares in the order of windows of side x side, and how many each window has."""
    frames = [_windows_of(h, w, side) for t, h, w in grids for _ in range(t)]
    starts = np.cumsum([0, *frames_of(grids)[:-1]])
    order = np.concatenate([start + own for start, (own, _) in zip(starts, frames, strict=True)])
    return order, np.concatenate([counts for _, counts in frames])


@lru_cache(KNOWN_GRIDS)
def _windows_of(rows: int, columns: int, side: int) -> tuple[Array, Array]:
    """Return by_windows of one frame; callers only read it."""
    row, column = np.indices((rows, columns)) // side
    window = (row * (-(-columns // side)) + column).ravel()
    return window.argsort(kind="stable"), np.bincount(window)


@lru_cache(KNOWN_GRIDS)
def corners_of(rows: int, columns: int, merge: int, side: int) -> tuple[Array, Array]:
    """Return which of side x side learned positions are around each patch, [4, P], and their shares, float64.

    Corners of the square of positions are an image's. Callers only read it.
    """
    sizes = np.maximum([[rows - 1], [columns - 1]], 1).astype(np.float32)
    exact = places_of(rows, columns, merge).astype(np.float32) * (side - 1) / sizes
    first = exact.astype(np.int64)
    (low, left), (high, right) = first, np.minimum(first + 1, side - 1)
    row, column = exact.astype(np.float64) - first
    numbers = [y * side + x for y in (low, high) for x in (left, right)]
    return np.stack(numbers), np.stack([y * x for y in (1 - row, row) for x in (1 - column, column)])
