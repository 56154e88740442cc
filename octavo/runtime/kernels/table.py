"""`KernelTable`: every kernel the runtime may call, as plain functions chosen once, at construction.

Platforms build a table (`cpu_table`, `ref_table`); layers and attention back ends hold it and call its
fields. Signature and meaning of each op stand here; `ref/` holds the slow twins in torch that say what is
right, `cpu/` the compiled ones. Callers are right about shapes by construction: a kernel may `assert` them.

T = tokens, H = heads, D = head_dim, M = rows of activations, N = outputs, K = inputs. Activations are float32
on CPU. "Token-strided" = contiguous in all but the first axis, so slices of a fused projection need no copy.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, overload

from torch import Tensor

from octavo.runtime.kernels.choice import Draw, FindCut, RowLimits

Activations = Literal["float32", "bfloat16", "int16", "int8"]
Gate = Literal["silu", "gelu", "gelu_tanh"]


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


class StoreKV(Protocol):
    """What happens between a layer's projections and its attention."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: Tensor,
        slots: Tensor,
        *,
        rotation: Rotation | None = None,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        """Normalise, then rotate the heads of q and k; store k and v in `cache`; return the new q.

        q:      [T, num_heads, D], token-strided; it and k may be overwritten
        k, v:   [T, num_kv_heads, D], token-strided
        cache:  [num_blocks, 2, block_size, num_kv_heads, D] f32, bf16, f16 or, clamped to ±448,
                float8_e4m3fn; on CPU also int8 with scales, as in cache_layout; changed in place
        slots:  [T] int64, block_id * block_size + offset; -1 = keep nothing
        """


class PagedAttention(Protocol):
    """Causal attention of a ragged batch over the paged cache."""

    def __call__(  # noqa: PLR0913  # what attention is made of
        self,
        q: Tensor,
        cache: Tensor,
        block_tables: Tensor,
        cu_q_lens: Tensor,
        kv_lens: Tensor,
        *,
        scale: float,
        sliding_window: int = 0,
        soft_cap: float = 0.0,
        num_singles: int = 0,
        common_start: bool = False,
        activations: Activations = "float32",
    ) -> Tensor:
        """Attend each new token to the cached tokens up to and including itself; returns a tensor like q.

        q:             [T, num_heads, head_dim], token-strided; num_heads a multiple of num_kv_heads
        cache:         as in StoreKV, this step's keys and values already written
        block_tables:  [R, max_blocks] int32; entries outside what a query sees are never read
        cu_q_lens:     [R + 1] int32; the queries of request r are the last ones of its kv_lens[r] tokens
        kv_lens:       [R] int32; 0 = padding, whose one row of the result is arbitrary but finite
        sliding_window: positions a query sees, itself included; 0 = all
        soft_cap:      scores become soft_cap * tanh(score / soft_cap); 0 = off
        num_singles:   so many of the first requests have one query each; what is not told costs speed only
        common_start:  most neighbours have their first blocks in common; what is not so costs speed only
        activations:   "bfloat16" on CPU: over a cache of bf16, queries and weights may be rounded, too
        """


class RMSNorm(Protocol):
    """Root mean square normalisation over the last axis."""

    @overload
    def __call__(self, x: Tensor, weight: Tensor, eps: float, residual: None = None) -> Tensor: ...
    @overload
    def __call__(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> tuple[Tensor, Tensor]: ...
    def __call__(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return x / rms(x) * weight; with `residual`, (the same of x + residual, x + residual).

        x, residual:  [T, size] or [T, H, size], token-strided; unchanged
        weight:       [size], of x's dtype
        """


class SandwichNorm(Protocol):
    """The norm of what a layer gives and, once that is added to the residual stream, the norm of the sum."""

    def __call__(
        self, x: Tensor, inner: Tensor, weight: Tensor, eps: float, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        """To the bit what `RMSNorm` by `weight` gives for that by `inner` and `residual`.

        x, residual: [T, size], token-strided; unchanged
        """


class RotaryTables(Protocol):
    """What a `Rotation` turns by."""

    def __call__(self, positions: Tensor, frequencies: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        """Return cos and sin of each position times each frequency, both times `factor`: [T, R / 2] float32.

        positions: [T] int64; frequencies: [R / 2] float32; the angles are float32, too
        """


class Activation(Protocol):
    """An element-wise activation."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return act(x); the `_and_mul` kinds take x = (gate, up) side by side and return act(gate) * up.

        x: [T, I] (or [T, 2 I]), contiguous; returns a new tensor [T, I]
        """


class Matmul(Protocol):
    """Linear layer with weights of the type of the activations."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x: [M, K], token-strided; weight: [N, K], contiguous; bias: [N]; returns x @ weight.T + bias."""


class Summands(NamedTuple):
    """A product that is still a sum. parts: [P, T, size] float32, contiguous, one per share of its inputs."""

    parts: Tensor


Addend = Tensor | Summands
"""What a norm adds to the residual stream."""


class SplitMatmul(Protocol):
    """`Matmul` without a bias, for a norm that adds."""

    def __call__(self, x: Tensor, weight: Tensor) -> Addend:
        """The product; its summands, where these are there sooner. x is contiguous."""


class SumNorm(Protocol):
    """`RMSNorm` with a residual stream, for what `SplitMatmul` may return."""

    def __call__(self, x: Summands, weight: Tensor, eps: float, residual: Tensor) -> tuple[Tensor, Tensor]:
        """As of the sum of x, rounded once: when the stream is added. residual: [T, size], token-strided."""


class SplitProduct(NamedTuple):
    """A product that may leave its last step to the norm behind it."""

    matmul: SplitMatmul
    norm: SumNorm


class Turns(NamedTuple):
    """What host and device tell each other of recorded steps, which use its rows in turn.

    given:     [turns, most numbers] int64, written by the host before a step
    token_ids: [turns, most rows] int64, read by the host after it; as are
    peaks:     [turns, most rows] float32
    begun:     [1] int64 on the device: how many steps have begun; the others may be the host's memory
    """

    given: Tensor
    token_ids: Tensor
    peaks: Tensor
    begun: Tensor


class BeginStep(Protocol):
    """The first kernel of a recorded step."""

    def __call__(
        self,
        turns: Turns,
        numbers: Tensor,
        kept_ids: Tensor,
        kept_tables: Tensor,
        ids: Tensor,
        tables: Tensor,
    ) -> None:
        """Count the step, copy what its turn was given, and look up what that names.

        numbers:     [n] int64, written: places [T] in kept_ids, slots [R], and whatever else is given
        kept_ids:    [any] int64
        kept_tables: [groups, slots, max_blocks] int32, contiguous
        ids:         [T] int64, written: kept_ids at the places
        tables:      [groups, R, max_blocks] int32, contiguous, written: kept_tables at the slots
        """


class EndStep(Protocol):
    """The last kernel of a recorded step."""

    def __call__(
        self,
        turns: Turns,
        token_ids: Tensor,
        peaks: Tensor,
        targets: Tensor,
        kept_ids: Tensor,
        vocab_size: int,
    ) -> None:
        """Tell the host what was chosen, and keep it for the next step.

        token_ids, peaks: [n] int64 and float32, from `Draw`; an id that is none becomes the nearest
        targets:          [n] int64, places in kept_ids to write to; equal ones get one of their ids
        """


class StepEnds(NamedTuple):
    """Both ends of a recorded step."""

    begin: BeginStep
    end: EndStep


class BlockDequantize(Protocol):
    """Unpack quantized rows."""

    def __call__(self, blocks: Tensor, type_name: str) -> Tensor:
        """blocks: [rows, row_bytes] uint8 of a type of base.gguf.BLOCK_TYPES; returns [rows, K] float32."""


class BlockGather(Protocol):
    """Embedding lookup in a matrix that stays packed."""

    def __call__(self, blocks: Tensor, places: Tensor, type_name: str, scale: float = 1.0) -> Tensor:
        """Return the unpacked rows at `places` [T] int64, times `scale`; blocks as in BlockDequantize."""


class BlockMatmul(Protocol):
    """Linear layer with weights that stay packed."""

    def __call__(
        self,
        x: Tensor,
        blocks: Tensor,
        type_name: str,
        bias: Tensor | None = None,
        activations: Activations = "float32",
        out: Tensor | None = None,
    ) -> Tensor:
        """Return x @ dequantized(blocks).T + bias.

        x:       [M, K] float32, token-strided
        blocks:  [N, row_bytes] uint8, contiguous
        bias:    [N] float32
        activations: "bfloat16" rounds x and the unpacked weights to bfloat16, for the types of
                 BFLOAT16_TYPES; "int16" and "int8" round x to so many bits, every 32 numbers by the largest
                 of them, and multiply integers, for those of INTEGER_TYPES; other types are multiplied as for
                 "float32", and so may a kernel where rounding gains nothing
        out:     [M, N] to write to, token-strided: columns of a wider tensor, perhaps
        returns  out, or a new [M, N]; from compiled kernels, a row never depends on the other rows nor on the
                 thread count
        """


class GatedBlockMatmul(Protocol):
    """The first half of a gated feed-forward block: `block_matmul` and its activation in one kernel."""

    def __call__(
        self, x: Tensor, blocks: Tensor, type_name: str, gate: Gate, activations: Activations
    ) -> Tensor | None:
        """Return [T, N / 2] float32, to the bit what the two kernels give; None where one kernel cannot.

        blocks: as in BlockMatmul, N rows: gates, then as many values
        """


Packed = tuple[Tensor, str]
"""A matrix as BlockMatmul takes it: blocks, and the name of their type."""
BlockFeedForward = Callable[[Tensor, Packed, Gate, Packed, Activations], Tensor | None]
"""Takes x: [T, K] float32, and the two matrices of a gated feed-forward block; returns [T, N] float32.

To the bit what GatedBlockMatmul by the first and BlockMatmul by the second give; None where it gains nothing.
"""


class BlockLikeliest(Protocol):
    """A language model's head where only the likeliest tokens are wanted: no logits are kept."""

    def __call__(
        self, x: Tensor, blocks: Tensor, type_name: str, activations: Activations
    ) -> tuple[Tensor, Tensor] | None:
        """Return what Draw finds in BlockMatmul's result; None where one kernel cannot, or gains nothing.

        x: [n, K] float32, token-strided; blocks: as in BlockMatmul
        returns ids [n] int64 and their logits [n] float32
        """


INTEGER_TYPES = frozenset({"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"})
"""Types that integers are multiplied with: 32 weights or more in a block."""

BFLOAT16_TYPES = INTEGER_TYPES | {"BF16"}
"""Types whose weights may be rounded to bfloat16: not those that were chosen to be more exact."""


RecordTape = Callable[[Callable[[], None]], Callable[[], None] | None]
"""Takes work that calls these kernels on the same memory every time; returns what repeats it.

Nothing is computed while it is recorded. None for work that computes by other means. Recordings share memory:
what a repetition leaves in tensors that the work made is good until the next repetition.
"""


@dataclass(frozen=True)
class KernelTable:
    """One implementation of every op."""

    name: str
    store_kv: StoreKV
    paged_attention: PagedAttention
    rms_norm: RMSNorm
    rotary_tables: RotaryTables
    silu_and_mul: Activation
    gelu_and_mul: Activation
    gelu_tanh_and_mul: Activation
    gelu: Activation
    gelu_tanh: Activation
    matmul: Matmul
    gated_matmul: Matmul
    """`silu_and_mul` of the product: the rows of the matrix are gates, then as many values."""
    draw: Draw
    row_limits: RowLimits
    cut: FindCut
    step_ends: StepEnds
    block_dequantize: BlockDequantize
    block_gather: BlockGather
    block_matmul: BlockMatmul
    split_product: SplitProduct | None = None
    """Where a norm forms the sum of some products faster than they do it themselves."""
    activations: Activations = "float32"
    """What `block_matmul` is best given where the user leaves the choice."""
    gated_block_matmul: GatedBlockMatmul | None = None
    block_feed_forward: BlockFeedForward | None = None
    block_likeliest: BlockLikeliest | None = None
    sandwich_norm: SandwichNorm | None = None
    record_tape: RecordTape | None = None
    """Only where calling a kernel costs as much as a small kernel itself."""
