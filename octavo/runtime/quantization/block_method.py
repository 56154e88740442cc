"""`BlockMethod`: a matrix that block kernels multiply, and the kernels that fuse what surrounds the product.

The base of the methods whose weights are GGUF blocks, or plain numbers seen as blocks of one.
"""

from abc import abstractmethod

from torch import Tensor

from octavo.runtime.kernels.activations import Gate
from octavo.runtime.kernels.linear import Packed
from octavo.runtime.quantization.method import LinearMethod, Storage


class BlockMethod(LinearMethod):
    """Multiplies by `block_matmul`, and by the fused kernels that the platform has."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    @abstractmethod
    def packed(self) -> Packed | None:
        """Return the whole matrix as `block_matmul` takes it; None if it is in several pieces."""

    def apply_gated(self, x: Tensor, bias: Tensor | None, gate: Gate) -> Tensor | None:
        """See LinearMethod."""
        kernel = self._storage.kernels.gated_block_matmul
        if kernel is None or bias is not None or (packed := self.packed()) is None:
            return None
        return kernel(x, *packed, gate, self._storage.input_precision)

    def apply_feed_forward(self, x: Tensor, gate: Gate, down: LinearMethod) -> Tensor | None:
        """See LinearMethod."""
        kernel = self._storage.kernels.block_feed_forward
        if kernel is None or not isinstance(down, BlockMethod):
            return None
        up_packed, down_packed = self.packed(), down.packed()
        if up_packed is None or down_packed is None:
            return None
        return kernel(x, up_packed, gate, down_packed, self._storage.input_precision)

    def apply_greedy(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """See LinearMethod."""
        kernel = self._storage.kernels.block_greedy
        if kernel is None or (packed := self.packed()) is None:
            return None
        return kernel(x, *packed, self._storage.input_precision)
