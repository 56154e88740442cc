"""`KernelTable`: every kernel the runtime may call, as plain functions chosen once, at construction.

Platforms build a table (`cpu_table`, `ref_table`); layers and attention back ends hold it and call its
fields. Signature and meaning of each op stand here; `ref/` holds the slow twins in torch that say what is
right, `cpu/` the compiled ones. Callers are right about shapes by construction: a kernel may `assert` them.

T = tokens, H = heads, D = head_dim, M = rows of activations, N = outputs, K = inputs. Activations are float32
on CPU. "Token-strided" = contiguous in all but the first axis, so slices of a fused projection need no copy.
"""

from dataclasses import dataclass
from typing import Literal, Protocol, overload

from torch import Tensor

Activations = Literal["float32", "int8"]


class WriteKV(Protocol):
    """Store new keys and values at their slots."""

    def __call__(self, k: Tensor, v: Tensor, cache: Tensor, slots: Tensor) -> None:
        """Write into `cache`, converting to its dtype.

        k, v:   [T, num_kv_heads, head_dim], token-strided
        cache:  [num_blocks, 2, block_size, num_kv_heads, head_dim] f32, bf16 or f16; changed in place
        slots:  [T] int64, block_id * block_size + offset; -1 = keep nothing
        """


class PagedAttention(Protocol):
    """Causal attention of a ragged batch over the paged cache."""

    def __call__(
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
    ) -> Tensor:
        """Attend each new token to the cached tokens up to and including itself; returns a tensor like q.

        q:             [T, num_heads, head_dim], token-strided; num_heads a multiple of num_kv_heads
        cache:         as in WriteKV, this step's keys and values already written
        block_tables:  [R, max_blocks] int32; entries outside what a query sees are never read
        cu_q_lens:     [R + 1] int32; the queries of request r are the last ones of its kv_lens[r] tokens
        kv_lens:       [R] int32
        sliding_window: positions a query sees, itself included; 0 = all
        soft_cap:      scores become soft_cap * tanh(score / soft_cap); 0 = off
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


class ApplyRope(Protocol):
    """Rotary position embedding, in place."""

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> None:
        """Rotate the first R components of every head of `x` in place.

        x:         [T, H, D], token-strided; queries and keys that lie side by side rotate in one call
        cos, sin:  [T, R / 2] float32, R <= D: this step's table, made once, kept in ForwardBatch.scratch
        interleaved: pairs are (0, 1), (2, 3) …; otherwise (0, R / 2), (1, R / 2 + 1) … (GPT-NeoX)
        """


class Activation(Protocol):
    """An element-wise activation."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return act(x); the `_and_mul` kinds take x = (gate, up) side by side and return act(gate) * up.

        x: [T, I] (or [T, 2 I]), contiguous; returns a new tensor [T, I]
        """


class BlockDequantize(Protocol):
    """Unpack quantized rows."""

    def __call__(self, blocks: Tensor, type_name: str) -> Tensor:
        """blocks: [rows, row_bytes] uint8 of a type of base.gguf.BLOCK_TYPES; returns [rows, K] float32."""


class BlockMatmul(Protocol):
    """Linear layer with weights that stay packed."""

    def __call__(
        self,
        x: Tensor,
        blocks: Tensor,
        type_name: str,
        bias: Tensor | None = None,
        activations: Activations = "float32",
    ) -> Tensor:
        """Return x @ dequantized(blocks).T + bias.

        x:       [M, K] float32, token-strided
        blocks:  [N, row_bytes] uint8, contiguous
        bias:    [N] float32
        activations: "int8" rounds x dynamically to 8 bits per block of 32 and multiplies integers, for the
                 types of INT8_TYPES; other types are multiplied as for "float32"
        returns  [M, N]; from compiled kernels, a row never depends on the other rows nor on the thread count
        """


INT8_TYPES = frozenset({"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"})
"""Types that have an integer path."""


@dataclass(frozen=True)
class KernelTable:
    """One implementation of every op."""

    name: str
    write_kv: WriteKV
    paged_attention: PagedAttention
    rms_norm: RMSNorm
    apply_rope: ApplyRope
    silu_and_mul: Activation
    gelu_and_mul: Activation
    gelu_tanh_and_mul: Activation
    gelu: Activation
    gelu_tanh: Activation
    block_dequantize: BlockDequantize
    block_matmul: BlockMatmul
