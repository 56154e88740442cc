"""The linear family: products with the matrices of a model, dense or packed, and lookups of their rows.

T = tokens, M = rows of activations, N = outputs, K = inputs. Activations are float32 on CPU. "Token-strided"
= contiguous in all but the first axis.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from octavo.runtime.kernels.activations import Gate
from octavo.runtime.kernels.norms import ResidualUpdate, SumNorm
from octavo.runtime.kernels.precision import InputPrecision


class Matmul(Protocol):
    """Linear layer with weights of the type of the activations."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x: [M, K], token-strided; weight: [N, K], contiguous; bias: [N]; returns x @ weight.T + bias."""


class SplitMatmul(Protocol):
    """`Matmul` without a bias, for a norm that adds."""

    def __call__(self, x: Tensor, weight: Tensor) -> ResidualUpdate:
        """The product; its partial sums, where these are there sooner. x is contiguous."""


class SplitProduct(NamedTuple):
    """A product that may leave its last step to the norm behind it."""

    matmul: SplitMatmul
    norm: SumNorm


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
        input_precision: InputPrecision = "float32",
        out: Tensor | None = None,
    ) -> Tensor:
        """Return x @ dequantized(blocks).T + bias.

        x:       [M, K] float32, token-strided
        blocks:  [N, row_bytes] uint8, contiguous
        bias:    [N] float32
        input_precision: "bfloat16" rounds x and the unpacked weights to bfloat16, for the types of
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
        self, x: Tensor, blocks: Tensor, type_name: str, gate: Gate, input_precision: InputPrecision
    ) -> Tensor | None:
        """Return [T, N / 2] float32, to the bit what the two kernels give; None where one kernel cannot.

        blocks: as in BlockMatmul, N rows: gates, then as many values
        """


Packed = tuple[Tensor, str]
"""A matrix as BlockMatmul takes it: blocks, and the name of their type."""
BlockFeedForward = Callable[[Tensor, Packed, Gate, Packed, InputPrecision], Tensor | None]
"""Takes x: [T, K] float32, and the two matrices of a gated feed-forward block; returns [T, N] float32.

To the bit what GatedBlockMatmul by the first and BlockMatmul by the second give; None where it gains nothing.
"""


class BlockGreedy(Protocol):
    """A language model's head where only greedy tokens are wanted: no logits are kept."""

    def __call__(
        self, x: Tensor, blocks: Tensor, type_name: str, input_precision: InputPrecision
    ) -> tuple[Tensor, Tensor] | None:
        """Return what Draw finds in BlockMatmul's result; None where one kernel cannot, or gains nothing.

        x: [n, K] float32, token-strided; blocks: as in BlockMatmul
        returns ids [n] int64 and their logits [n] float32
        """


@dataclass(frozen=True)
class LinearKernels:
    """The kernels of linear layers; None where a platform has no such kernel."""

    matmul: Matmul
    gated_matmul: Matmul
    """`silu_and_mul` of the product: the rows of the matrix are gates, then as many values."""
    block_dequantize: BlockDequantize
    block_gather: BlockGather
    block_matmul: BlockMatmul
    input_precision: InputPrecision = "float32"
    """What `block_matmul` is best given where the user leaves the choice."""
    split_product: SplitProduct | None = None
    """Where a norm forms the sum of some products faster than they do it themselves."""
    gated_block_matmul: GatedBlockMatmul | None = None
    block_feed_forward: BlockFeedForward | None = None
    block_greedy: BlockGreedy | None = None
