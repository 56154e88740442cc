"""The attention family: what happens between a layer's projections, in and out, over the paged cache.

T = tokens, H = heads, D = head_dim. "Token-strided" = contiguous in all but the first axis, so slices of a
fused projection need no copy.
"""

from collections.abc import Callable
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
    """RMS norms over every head of queries and of keys; without a weight of queries, of keys only.

    Weights: [D], of the activations' type; of keys only, [C]: their last C components are normalised.
    follows_rotation: instead of preceding it
    """

    q_weight: Tensor | None
    k_weight: Tensor
    eps: float
    follows_rotation: bool = False


class HeadInputs(NamedTuple):
    """What a layer projects of the step's tokens, and how it enters attention: norms first, then rotation.

    q:    [T, num_heads, D], token-strided; it and k may be overwritten
    k, v: [T, num_kv_heads, D], token-strided
    q_factors: [T] float32, contiguous: what all queries of a token are multiplied by in the end
    """

    q: Tensor
    k: Tensor
    v: Tensor
    rotation: Rotation | None = None
    norms: HeadNorms | None = None
    q_factors: Tensor | None = None


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
    from_start: bool = False
    """Requests behind the singles have no tokens in the cache before; what is not told costs speed only."""
    longest_q: int = 0
    """The most new tokens of a request; 0 = not known: the step is repeated for other requests."""
    alike: list[tuple[int, int, Tensor]] | None = None
    """Those with equally many new tokens and keys, and where: kernels that ask keep it for later layers."""


class Scores(NamedTuple):
    """How queries and keys are compared.

    sliding_window: positions a query sees, itself included; 0 = all
    soft_cap:       scores become soft_cap * tanh(score / soft_cap); 0 = off
    input_precision: "bfloat16" on CPU: over a cache of bf16, queries and weights may be rounded, too; over
                     one of float32 that is seen to both sides, all to 16 bits
    is_causal:       a query sees no later position; otherwise the window counts to both sides
    keys_only:       of a latent cache: so many first components nobody reads of the result, which may be
                     anything there
    sinks:           [num_heads] float32, contiguous: scores of a key that every query sees, with values of 0;
                     not of a latent cache
    """

    scale: float
    sliding_window: int = 0
    soft_cap: float = 0.0
    input_precision: InputPrecision = "float32"
    is_causal: bool = True
    keys_only: int = 0
    sinks: Tensor | None = None


class Share(NamedTuple):
    """The part of a request's keys that one of several ranks has, and what others need to know of it.

    num_seen: [T] int32: how many of the cached keys each query sees, at least as many as the one before it in
              its request; none later than these are read
    log_sums: [T, num_heads] float32, contiguous, written: the logarithm of the sum over these keys of the
              exponentials of the scores; -inf where there is no key, and the result 0
    """

    num_seen: Tensor
    log_sums: Tensor


class StoreKV(Protocol):
    """What happens between a layer's projections and its attention."""

    def __call__(self, new: HeadInputs, cache: Tensor, slots: Tensor) -> Tensor:
        """Normalise, then rotate the heads of q and k; store k and v in `cache`; return the new q.

        cache:  [num_blocks, 2, block_size, num_kv_heads, D] f32, bf16, f16 or, clamped to ±448,
                float8_e4m3fn; on CPU also int8 with scales, as in cache_layout; changed in place.
                With 1 for 2 keys are the values, too, and v is not looked at
        slots:  [T] int64, block_id * block_size + offset; -1 = keep nothing
        """


class PagedAttention(Protocol):
    """Attention of a ragged batch over the paged cache, causal or to both sides."""

    def __call__(
        self,
        q: Tensor,
        cache: Tensor,
        block_tables: Tensor,
        batch: Ragged,
        scores: Scores,
        share: Share | None = None,
    ) -> Tensor:
        """Attend each new token to the cached tokens that it sees; returns a tensor like q.

        q:             [T, num_heads, head_dim], token-strided; num_heads a multiple of num_kv_heads
        cache:         as in StoreKV, this step's keys and values already written
        block_tables:  [R, max_blocks] int32; entries outside what a query sees are never read
        share:         the cache has a part of the keys, kv_lens of them, of causal attention without window
                       and sinks
        """


class Pieces(NamedTuple):
    """Requests cut where chunks of positions end: bounds and lengths as in Ragged, of P pieces.

    block_tables: [P, blocks of a chunk] int32
    """

    cu_q_lens: Tensor
    kv_lens: Tensor
    block_tables: Tensor


class CutChunks(Protocol):
    """Attention of tokens to their own chunk is attention of more requests, with fewer keys."""

    def __call__(self, batch: Ragged, block_tables: Tensor, size: int, blocks: int, most: int) -> Pieces:
        """Return one piece of each single, and `most` of each request behind, from its first new token's on.

        Those behind its last token have no tokens, and a key that nobody reads.
        size, blocks: positions and blocks of a chunk; most: chunks that new tokens of a request may fall into
        """


class MergeParts(Protocol):
    """What ranks have seen, as one."""

    def __call__(self, parts: Tensor, log_sums: Tensor, sinks: Tensor | None) -> Tensor:
        """Add up the parts, each weighted by its sum: [T, num_heads, head_dim], contiguous; 0 of nothing.

        parts:    [ranks, T, num_heads, head_dim], whose last axis is contiguous, and
        log_sums: [ranks, T, num_heads]: as `PagedAttention` leaves them in a Share
        sinks:    as in Scores
        """


DistanceAttention = Callable[[Tensor, Tensor, Tensor, Ragged, Tensor, float], Tensor]
"""Causal attention of q over a cache of floats as in PagedAttention, by its block tables and batch.

Last: terms of scores [N, H], of keys 0 … N - 1 positions before a query, N - 1 for all farther ones; a scale.
"""
PackedAttention = Callable[[HeadInputs, Ragged, Scores], Tensor | None]
"""Attends whole requests to both sides, without a cache; None where `PagedAttention` has to."""


class PlainPrompts(NamedTuple):
    """New tokens of requests that have no others, with keys and values per head.

    P, R and V are the sizes of what of a head does not rotate, of what does, and of values.

    q:         [T, num_heads, P + R], token-strided; its end is not looked at
    q_rope:    [T, num_heads, R], strided: that end, rotated
    made:      [T, num_heads, P + V], contiguous: parts of keys, and values
    k_rope:    [T, R], strided: the end of all heads' keys, rotated
    cu_q_lens: [requests + 1] int32, the first of which may be any number
    """

    q: Tensor
    q_rope: Tensor
    made: Tensor
    k_rope: Tensor
    cu_q_lens: Tensor
    scale: float


LatentPrompts = Callable[[PlainPrompts, Tensor], None]
"""Attends each token to those of its request up to itself; fills out [T, num_heads, V], contiguous."""


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
    cut_chunks: CutChunks
    distance_attention: DistanceAttention
    latent_prompts: LatentPrompts | None = None
    merge_parts: MergeParts | None = None
    """None: as fast by torch's own."""
    packed_attention: PackedAttention = lambda new, batch, scores: None
    input_precision: InputPrecision = "float32"
    """What `paged_attention` is best given where the user leaves the choice."""
