"""Weights in GGUF blocks are multiplied as they are stored.

The segments of a merged projection (q, k, v; gate, up) that have one type are joined, so that one call of the
kernel multiplies them. Large matrices stay where the file is mapped.
"""

from collections.abc import Iterable
from itertools import accumulate, groupby

from torch import Tensor

from octavo.config.engine import EngineConfig
from octavo.runtime.kernels.activations import Activation
from octavo.runtime.kernels.linear import Packed
from octavo.runtime.quantization.blocks import Blocks, join
from octavo.runtime.quantization.experts import make_block_experts
from octavo.runtime.quantization.method import ExpertsMethod, LinearMethod, Scheme, Storage
from octavo.runtime.quantization.parameter import BlockParameter, Layout, MakeBlocks, Parameter


class GGUF(Scheme):
    """Serves the matrices of a GGUF file, whatever their types."""

    @classmethod
    def matches(cls, config: EngineConfig) -> bool:
        return config.model.load_format == "gguf"

    def linear(self, name: str) -> LinearMethod:
        """Return a method over blocks; the types are known once the tensors are."""
        return GGUFLinear(self.storage)

    def is_packed(self, name: str) -> bool:
        return True

    def experts(self, name: str) -> ExpertsMethod:
        """Return a method over blocks; on a GPU they are unpacked, but for MXFP4."""
        return make_block_experts(self.storage)


class GGUFLinear(LinearMethod):
    """Multiplies one matrix, a row of segments of one block type each, by the kernels for blocks.

    Of those that fuse what surrounds the product it uses what the platform has; they take a single segment.
    """

    def __init__(
        self, storage: Storage, parameter: MakeBlocks = BlockParameter, *, rounds_inputs: bool = False
    ) -> None:
        """Begin empty.

        parameter:     what takes the tensors of the checkpoint
        rounds_inputs: the weights' recipe multiplies 8-bit numbers by 8-bit numbers
        """
        self._storage, self._parameter_type = storage, parameter
        self._rounds_inputs = rounds_inputs
        self._segments: list[Packed] = []
        self._whole: Packed | None = None
        """The only segment."""
        self._is_ordered = False
        """Inputs must be brought into the order of the columns first."""

    def create(self, layout: Layout) -> dict[str, Parameter]:
        self._parameter = self._parameter_type(layout, self._storage.device)
        return {"weight": self._parameter}

    def after_load(self) -> None:
        runs = groupby(self._parameter.take(), key=lambda segment: segment.type)
        self._keep(join(list(run), self._storage.arena) for _, run in runs)

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        multiply = self._storage.kernels.block_matmul
        if self._whole is not None:
            return multiply(x, self._whole, bias)
        ends = list(accumulate(len(segment.blocks) for segment in self._segments))
        out = x.new_empty(x.shape[0], ends[-1])
        for segment, end in zip(self._segments, ends, strict=True):
            columns = slice(end - len(segment.blocks), end)
            multiply(x, segment, None if bias is None else bias[columns], out[:, columns])
        return out

    def apply_gated(self, x: Tensor, bias: Tensor | None, gate: Activation) -> Tensor | None:
        kernel = self._storage.kernels.gated_block_matmul
        if kernel is None or bias is not None or self._whole is None:
            return None
        return kernel(x, self._whole, gate)

    def apply_activated(self, x: Tensor, bias: Tensor | None, activation: Activation) -> Tensor | None:
        kernel = self._storage.kernels.activated_block_matmul
        if kernel is None or self._whole is None or self._is_ordered:
            return None
        return kernel(x, self._whole, bias, activation)

    def apply_feed_forward(self, x: Tensor, gate: Activation, down: LinearMethod) -> Tensor | None:
        kernel = self._storage.kernels.block_feed_forward
        if kernel is None or not isinstance(down, GGUFLinear) or self._is_ordered or down._is_ordered:
            return None
        if self._whole is None or down._whole is None:
            return None
        return kernel(x, self._whole, gate, down._whole)

    def apply_greedy(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        kernel = self._storage.kernels.block_greedy
        return None if kernel is None or self._whole is None else kernel(x, self._whole)

    def gather(self, ids: Tensor, scale: float = 1.0) -> Tensor:
        (table,) = self._segments
        rows = self._storage.kernels.block_dequantize(table, ids, scale)
        return rows.to(self._storage.compute_dtype)

    def roll(self, count: int) -> None:
        (matrix,) = self._segments
        self._segments = [matrix.roll(count)]
        self._whole = self._segments[0]

    def describe(self) -> list[str]:
        told = ((part.describe(), self._storage.kernels.explain(part)) for part in self._segments)
        return [f"{what}: {how}" if how else what for what, how in told]

    def _keep(self, segments: Iterable[Blocks]) -> None:
        precision_of = self._storage.precision_of
        self._segments = [
            Packed(part.data, name, precision_of(name, rounds=self._rounds_inputs))
            for part in segments
            for name in [part.type.name]
        ]
        arrange = self._storage.kernels.arrange
        if arrange is not None:
            self._segments = [arrange(segment, self._storage.compute_dtype) for segment in self._segments]
        self._whole = self._segments[0] if len(self._segments) == 1 else None
