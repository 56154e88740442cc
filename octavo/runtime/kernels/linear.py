"""The linear family: products with the matrices of a model, dense or packed, and lookups of their rows.

T = tokens, M = rows of activations, N = outputs, K = inputs. Activations are float32 on CPU. "Token-strided"
= contiguous in all but the first axis.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from octavo.base.gguf import BlockType
from octavo.runtime.kernels.activations import Activation
from octavo.runtime.kernels.block_types import ARRANGED_TYPES, BFLOAT16_TYPES, INTEGER_TYPES, TYPES_BY_NAME
from octavo.runtime.kernels.norms import AddNorm, ResidualUpdate
from octavo.runtime.kernels.precision import InputPrecision


class Matmul(Protocol):
    """Linear layer with weights of the type of the activations."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x @ weight.T + bias. x: [M, K], token-strided; weight: [N, K], contiguous; bias: [N]."""


class SplitMatmul(Protocol):
    """`Matmul` without a bias, for a norm that adds."""

    def __call__(self, x: Tensor, weight: Tensor) -> ResidualUpdate:
        """Return the product; its partial sums, where these are there sooner. x is contiguous."""


class SplitProduct(NamedTuple):
    """A product that may leave its last step to the norm behind it."""

    matmul: SplitMatmul
    norm: AddNorm


class Packed(NamedTuple):
    """A matrix that stays packed, and what its inputs are rounded to.

    blocks: [N, row_bytes] uint8, contiguous, of a type of block_types;
            of several experts [E, N, row_bytes]
    input_precision: "bfloat16" rounds inputs and unpacked weights to bfloat16, for the types of
            BFLOAT16_TYPES, and splits those of F32, and their inputs, into sums of two such numbers (16 bits
            of the 24 count); "int16" and "int8" round inputs to so many bits, every 32 numbers by the largest
            of them, and multiply integers, for those of INTEGER_TYPES; other types are multiplied as for
            "float32", and so may a kernel where rounding gains nothing. "float8", and "int8" on GPUs, is what
            the recipe of an 8-bit checkpoint asks for: each row by its largest number (or in groups of 128)
    scales: of types that hold nothing but codes: one per row, [N], or per 128 inputs, [N or N / 128, K / 128]
    """

    blocks: Tensor
    type_name: str
    input_precision: InputPrecision = "float32"
    scales: Tensor | None = None

    @property
    def kind(self) -> BlockType:
        """Return the type of its blocks."""
        return ARRANGED_TYPES.get(self.type_name) or TYPES_BY_NAME[self.type_name]

    @property
    def num_inputs(self) -> int:
        """Return K."""
        return self.blocks.shape[-1] // self.kind.num_bytes * self.kind.block

    def roll(self, count: int) -> "Packed":
        """Return the matrix with the last `count` rows first."""
        scales = self.scales
        if scales is not None:
            scales = scales.repeat_interleave(len(self.blocks) // len(scales), 0).roll(count, 0)
        return self._replace(blocks=self.blocks.roll(count, 0), scales=scales)

    def describe(self) -> str:
        """Return type, shape, and what inputs are rounded to, for people."""
        rounded = BFLOAT16_TYPES if self.input_precision == "bfloat16" else INTEGER_TYPES
        is_rounded = self.type_name in rounded or self.scales is not None
        precision = self.input_precision if is_rounded else "float32"
        return f"{self.type_name} {self.blocks.shape[-2]}x{self.num_inputs}, inputs {precision}"


class BlockDequantize(Protocol):
    """Unpack a matrix, or look up rows of it."""

    def __call__(self, matrix: Packed, places: Tensor | None = None, scale: float = 1.0) -> Tensor:
        """Return the rows, or those at `places` [T] int64, times `scale`: [rows, K] float32."""


class BlockMatmul(Protocol):
    """Linear layer with weights that stay packed."""

    def __call__(
        self, x: Tensor, matrix: Packed, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Return x @ dequantized(matrix).T + bias.

        x:       [M, K] float32, token-strided
        bias:    [N] float32
        out:     [M, N] to write to, token-strided: columns of a wider tensor, perhaps
        returns  out, or a new [M, N]; from compiled kernels, a row never depends on the other rows nor on the
                 thread count
        """


SelectInputs = Callable[[Tensor, Tensor], Tensor]
"""Takes x: [M, K], token-strided, and places [J] int32 in its rows; returns [M, J], 0 where one is negative.

Before products with matrices whose columns stand in another order, or have gaps.
"""
Join = Callable[..., Tensor]
"""Takes parts [T, size], token-strided; returns them side by side, [T, sum of sizes]."""
GatedBlockMatmul = Callable[[Tensor, Packed, Activation], Tensor | None]
"""Takes x: [T, K] float32, and a matrix of N rows: gates, then as many values. Returns [T, N / 2] float32.

To the bit what BlockMatmul and Activate give; None where one kernel cannot.
"""
ActivatedBlockMatmul = Callable[[Tensor, Packed, Tensor | None, Activation], Tensor | None]
"""Takes x: [T, K] float32, a matrix and the bias [N]; returns their product's activation, [T, N] float32.

To the bit what BlockMatmul and Activate give; None where one kernel cannot.
"""
BlockFeedForward = Callable[[Tensor, Packed, Activation, Packed], Tensor | None]
"""Takes x: [T, K] float32, and the two matrices of a gated feed-forward block; returns [T, N] float32.

To the bit what GatedBlockMatmul by the first and BlockMatmul by the second give; None where it gains nothing.
"""
BlockGreedy = Callable[[Tensor, Packed], tuple[Tensor, Tensor] | None]
"""Takes x: [n, K] float32, token-strided, and a language model's head of which no logits are kept.

Returns what `greedy` finds in BlockMatmul's result, ids [n] int64 and their logits [n] float32; None where
one kernel cannot, or gains nothing.
"""
OwnRows = Callable[[Tensor, int, int], Tensor]
"""Takes ids [T] int64, the first and the number of a part's rows. Returns which of these they are: [T] int64.

-1 for none of them, for which BlockDequantize then has zeros.
"""


@dataclass(frozen=True)
class LinearKernels:
    """The kernels of linear layers; None where a platform has no such kernel."""

    matmul: Matmul
    gated_matmul: Matmul
    """silu(gates) * values, of the product: the rows of the matrix are gates, then as many values."""
    block_dequantize: BlockDequantize
    block_matmul: BlockMatmul
    select_inputs: SelectInputs
    join: Join
    input_precision: InputPrecision = "float32"
    """What `block_matmul` is best given where the user leaves the choice."""
    dense_precision: InputPrecision = "float32"
    """The same for weights that are bfloat16."""
    rounds: bool = False
    """Whether `block_matmul` rounds inputs that are to be bfloat16; else they stay floats."""
    split_product: SplitProduct | None = None
    """Where a norm forms the sum of some products faster than they do it themselves."""
    gated_block_matmul: GatedBlockMatmul | None = None
    block_feed_forward: BlockFeedForward | None = None
    block_greedy: BlockGreedy | None = None
    activated_block_matmul: ActivatedBlockMatmul | None = None
    own_rows: OwnRows | None = None
    splits_floats: bool = False
    """Whether `block_matmul` is faster with float32 weights if their inputs are "bfloat16"."""
    explain: Callable[[Packed], str] = lambda matrix: ""
    """Tells people which kernels multiply a matrix, for which numbers of rows, and why."""
    arrange: Callable[[Packed, torch.dtype], Packed] | None = None
    """Takes a matrix and the type of its inputs, once, after loading; returns it in the fastest form."""
