"""A rope (https://arxiv.org/abs/2104.09864) rotates queries and keys; some stretch a context.

A `Rope` is plain data that an architecture's config is read into; equal ropes share one `RotaryEmbedding`,
which makes the step's tables once and keeps them in the batch. Frequencies are computed in float32, as
Hugging Face does, so that long contexts agree to the last bit.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from octavo.base.errors import BadCheckpoint
from octavo.base.log import get_logger
from octavo.runtime.batch import ForwardBatch
from octavo.runtime.kernels.attention import AttentionKernels, Rotation
from octavo.runtime.transfer import Array

KNOWN_GRIDS = 64
"""Sizes of images whose index arrays are kept."""
logger = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Rope:
    """A Rope describes a rotation.

    dim: components of a head that rotate; interleaved: pairs are neighbours instead of halves
    mrope_section: how many frequencies turn by time, row and column of a patch (M-RoPE,
                   https://arxiv.org/abs/2409.12191); of text all three are its position
    mrope_interleaved: the three alternate, as in Qwen3-VL, instead of one behind the other
    """

    dim: int
    theta: float = 10000.0
    interleaved: bool = False
    mrope_section: tuple[int, ...] = ()
    mrope_interleaved: bool = False

    def frequencies(self) -> tuple[Tensor, float]:
        """Return (radians per position [dim / 2] float32, factor on cosine and sine)."""
        return 1.0 / self._wavelengths(), 1.0

    def axes(self) -> Tensor:
        """Return by which of the three positions of a patch each frequency turns, [dim / 2] int64.

        Raises BadCheckpoint.
        """
        if len(self.mrope_section) != 3 or sum(self.mrope_section) != self.dim // 2:
            raise BadCheckpoint(
                f"mrope_section={list(self.mrope_section)} must be three numbers of {self.dim // 2} in all"
            )
        if not self.mrope_interleaved:
            return torch.arange(3).repeat_interleave(torch.tensor(self.mrope_section))
        axes = torch.zeros(self.dim // 2, dtype=torch.int64)
        for axis in (1, 2):
            axes[axis : 3 * self.mrope_section[axis] : 3] = axis
        return axes

    def _wavelengths(self) -> Tensor:
        exponents = torch.arange(0, self.dim, 2, dtype=torch.int64).float() / self.dim
        return torch.as_tensor(self.theta**exponents)


@dataclass(frozen=True, kw_only=True)
class LinearRope(Rope):
    """Divides positions by a factor (https://arxiv.org/abs/2306.15595)."""

    factor: float

    def frequencies(self) -> tuple[Tensor, float]:
        return super().frequencies()[0] / self.factor, 1.0


@dataclass(frozen=True, kw_only=True)
class NTKRope(Rope):
    """Multiplies theta, and divides what is left (NTK-aware scaling as in GTE's encoders)."""

    factor: float

    def frequencies(self) -> tuple[Tensor, float]:
        """Stretch long waves by the factor squared, short ones hardly."""
        stretched = replace(self, theta=self.theta * self.factor)
        return 1.0 / (stretched._wavelengths() * self.factor ** (2 / self.dim)), 1.0


@dataclass(frozen=True, kw_only=True)
class DividedRope(Rope):
    """Divides each frequency by its own, as GGUF files say for Llama 3 (the tensor rope_freqs.weight)."""

    divisors: tuple[float, ...]

    def frequencies(self) -> tuple[Tensor, float]:
        """Divide each by its own divisor. Raises BadCheckpoint if there are not as many, or one is 0."""
        _check_divisors(self.divisors, self.dim // 2)
        return super().frequencies()[0] / torch.tensor(self.divisors), 1.0


@dataclass(frozen=True, kw_only=True)
class Llama3Rope(Rope):
    """Stretches long waves, keeps short ones, and blends those between (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def frequencies(self) -> tuple[Tensor, float]:
        """Blend by how often a wave turns within the original context."""
        plain = super().frequencies()[0]
        wavelengths = 2 * math.pi / plain
        turns = self.original_max_position_embeddings / wavelengths
        blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blended = (1 - blend) * plain / self.factor + blend * plain
        stretched = torch.where(turns < self.low_freq_factor, plain / self.factor, blended)
        return torch.where(turns > self.high_freq_factor, plain, stretched), 1.0


@dataclass(frozen=True, kw_only=True)
class LongRope(Rope):
    """Divides frequencies by one of two sets: for the original context or for a longer one (LongRoPE).

    Keys in the cache cannot change their rotation when a request outgrows the original context, so
    `max_model_len` chooses the set for all requests. Source: https://arxiv.org/abs/2402.13753.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    max_position_embeddings: int
    max_model_len: int
    factor: float | None = None
    attention_factor: float | None = None

    def frequencies(self) -> tuple[Tensor, float]:
        """Divide each by its own divisor. Raises BadCheckpoint if there are not as many, or one is 0."""
        for divisors in (self.short_factor, self.long_factor):
            _check_divisors(divisors, self.dim // 2)
        original = self.original_max_position_embeddings
        extended = self.max_model_len > original
        if extended:
            logger.warning(
                "Short texts, too, are rotated as for contexts over %d tokens, which costs some quality: "
                "set max_model_len to %d unless you need more.",
                original,
                original,
            )
        divisors = self.long_factor if extended else self.short_factor
        return 1.0 / (torch.tensor(divisors) * self._wavelengths()), self._scores_factor()

    def _scores_factor(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        original = self.original_max_position_embeddings
        factor = self.factor or self.max_position_embeddings / original
        return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


@dataclass(frozen=True, kw_only=True)
class YarnRope(Rope):
    """Interpolates long waves, keeps short ones, scales scores (YaRN, https://arxiv.org/abs/2309.00071)."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True

    def frequencies(self) -> tuple[Tensor, float]:
        """Blend by the dimension's number of turns within the original context."""
        waves = self._wavelengths()
        low, high = self._dimension_of(self.beta_fast), self._dimension_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        ramp = (torch.arange(self.dim // 2).float() - low) / (high - low or 0.001)
        keep = 1 - ramp.clamp(0, 1)
        return (1 - keep) / (self.factor * waves) + keep / waves, self._scores_factor()

    def _dimension_of(self, turns: float) -> float:
        """Return the (fractional) pair of components that turns this often within the original context."""
        length = self.original_max_position_embeddings / (turns * 2 * math.pi)
        return self.dim * math.log(length) / (2 * math.log(self.theta))

    def _scores_factor(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)
        return self._mscale(1.0)

    def _mscale(self, scale: float) -> float:
        return 0.1 * scale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


def _check_divisors(divisors: tuple[float, ...], count: int) -> None:
    if len(divisors) != count or not all(divisors):
        raise BadCheckpoint(f"{count} rope frequencies need as many divisors; found {divisors}")


class RotaryEmbedding:
    """Makes the tables of one rope on one device."""

    def __init__(self, rope: Rope, device: torch.device, kernels: AttentionKernels) -> None:
        frequencies, self._factor = rope.frequencies()
        self._frequencies = frequencies.to(device)
        self._interleaved = rope.interleaved
        self._key = repr(rope)
        self._kernel = kernels.rotary_tables
        self._axes = rope.axes().to(device) if rope.mrope_section else None

    def rotation(self, batch: ForwardBatch) -> Rotation:
        """Return the step's tables; the first layer that asks makes them."""
        rotation = batch.rotations.get(self._key)
        if rotation is None:
            if (axes := self._axes) is None or batch.patch_positions is None:
                cos, sin = self._turned(batch.positions)
            else:
                tables = [self._turned(positions) for positions in batch.patch_positions]
                cos, sin = (_by_axis(three, axes) for three in zip(*tables, strict=True))
            rotation = batch.rotations[self._key] = Rotation(cos, sin, self._interleaved)
        return rotation

    def _turned(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self._kernel(positions, self._frequencies, self._factor)


def _by_axis(tables: tuple[Tensor, ...], axes: Tensor) -> Tensor:
    """Take each column from the table of its axis."""
    times, rows, columns = tables
    return torch.where(axes == 0, times, torch.where(axes == 1, rows, columns))


class AxialRotary(RotaryEmbedding):
    """Rotates half of a head by the row of a patch, half by its column.

    Pixtral deals the frequencies out to the two in turn; Qwen's towers use the same for both.
    """

    def __init__(self, dim: int, theta: float, device: torch.device, *, shares: bool = False) -> None:
        exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        frequencies = (1.0 / theta**exponents).to(device)
        self._of_rows, self._of_columns = frequencies[0::2], frequencies[0 if shares else 1 :: 2]
        self._key = f"axial {dim} {theta} {shares}"

    def enter(self, batch: ForwardBatch, places: Tensor) -> None:
        """Make the tables of patches. places: [2, T], row and column of each in its image"""
        rows, columns = places.to(self._of_rows.device).float()[..., None]
        angles = torch.cat([rows * self._of_rows, columns * self._of_columns], dim=1)
        batch.rotations[self._key] = Rotation(angles.cos(), angles.sin())

    def rotation(self, batch: ForwardBatch) -> Rotation:
        """Return the tables that `enter` made."""
        return batch.rotations[self._key]


@lru_cache(KNOWN_GRIDS)
def places_of(rows: int, columns: int, merge: int = 1) -> Array:
    """Return row and column of an image's patches, [2, rows * columns]: squares of merge * merge in turn.

    Callers only read it: it is kept for the next image of this size.
    """
    squares = np.indices((rows, columns)).reshape(2, rows // merge, merge, columns // merge, merge)
    return squares.swapaxes(2, 3).reshape(2, -1)
