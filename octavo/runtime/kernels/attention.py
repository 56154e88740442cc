"""The attention family: what happens between a layer's projections, in and out, over the paged cache.

T = tokens, H = heads, D = head_dim. "Token-strided" = contiguous in all but the first axis, so slices of a
fused projection need no copy.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from octavo.runtime.kernels.precision import InputPrecision


class Rotation(NamedTuple):
    """Rotary position embedding of the first R components of every head of queries and keys.

    cos, sin:    [T, R / 2] float32, contiguous, R <= D: this step's tables
    interleaved: pairs are (0, 1), (2, 3) …; otherwise (0, R / 2), (1, R / 2 + 1) … (GPT-NeoX)
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False


class HeadNorms(NamedTuple):
    """RMS norms over every head of queries and of keys. Weights: [D], of the activations' type."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float


class HeadInputs(NamedTuple):
    """What a layer projects of the step's tokens, and how it enters attention: norms first, then rotation.

    q:    [T, num_heads, D], token-strided; it and k may be overwritten
    k, v: [T, num_kv_heads, D], token-strided
    """

    q: Tensor
    k: Tensor
    v: Tensor
    rotation: Rotation | None = None
    norms: HeadNorms | None = None


@dataclass(slots=True, kw_only=True)
class Ragged:
    """Requests whose new tokens stand one after the other, without padding. R = requests.

    cu_q_lens: [R + 1] int32; the queries of request r are the last ones of its kv_lens[r] tokens
    kv_lens:   [R] int32, tokens in the cache once this step's are written; 0 = padding, whose one row of the
               result is arbitrary but finite
    """

    cu_q_lens: Tensor
    kv_lens: Tensor
    num_singles: int = 0
    """So many of the first requests have one new token each; what is not told costs speed only."""
    common_start: bool = False
    """Most neighbours among these have their first blocks in common; what is not so costs speed only."""
    longest_q: int = 0
    """The most new tokens of a request; 0 = not known: the step is repeated for other requests."""


class Scores(NamedTuple):
    """How queries and keys are compared.

    sliding_window: positions a query sees, itself included; 0 = all
    soft_cap:       scores become soft_cap * tanh(score / soft_cap); 0 = off
    input_precision: "bfloat16" on CPU: over a cache of bf16, queries and weights may be rounded, too
    """

    scale: float
    sliding_window: int = 0
    soft_cap: float = 0.0
    input_precision: InputPrecision = "float32"


class StoreKV(Protocol):
    """What happens between a layer's projections and its attention."""

    def __call__(self, new: HeadInputs, cache: Tensor, slots: Tensor) -> Tensor:
        """Normalise, then rotate the heads of q and k; store k and v in `cache`; return the new q.

        cache:  [num_blocks, 2, block_size, num_kv_heads, D] f32, bf16, f16 or, clamped to ±448,
                float8_e4m3fn; on CPU also int8 with scales, as in cache_layout; changed in place
        slots:  [T] int64, block_id * block_size + offset; -1 = keep nothing
        """


class PagedAttention(Protocol):
    """Causal attention of a ragged batch over the paged cache."""

    def __call__(
        self, q: Tensor, cache: Tensor, block_tables: Tensor, batch: Ragged, scores: Scores
    ) -> Tensor:
        """Attend each new token to the cached tokens up to and including itself; returns a tensor like q.

        q:             [T, num_heads, head_dim], token-strided; num_heads a multiple of num_kv_heads
        cache:         as in StoreKV, this step's keys and values already written
        block_tables:  [R, max_blocks] int32; entries outside what a query sees are never read
        """


class RotaryTables(Protocol):
    """What a `Rotation` turns by."""

    def __call__(self, positions: Tensor, frequencies: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        """Return cos and sin of each position times each frequency, both times `factor`: [T, R / 2] float32.

        positions: [T] int64; frequencies: [R / 2] float32; the angles are float32, too
        """


@dataclass(frozen=True)
class AttentionKernels:
    """The kernels of attention."""

    store_kv: StoreKV
    paged_attention: PagedAttention
    rotary_tables: RotaryTables
