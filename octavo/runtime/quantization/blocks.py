"""`Blocks` is a matrix, or a stack of some, whose rows stay packed in blocks.

It answers the few questions a loader asks of a tensor (`shape`, `narrow`, `index_select`), so that parameters
cut their shard out of packed and plain weights with the same code. Rows can be taken freely; columns only
where a block ends. The bytes may be mapped from the file: nothing here writes to them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.base.errors import ConfigError
from octavo.base.gguf import BlockType
from octavo.runtime.kernels.block_types import TYPES_BY_NAME
from octavo.runtime.quantization.arena import Arena

_MOST_COPIED = 16 << 20  # bytes

_OF_ONE = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


@dataclass(frozen=True, slots=True)
class Blocks:
    """Holds packed rows. data: [rows, bytes per row] uint8, or a stack of such."""

    data: Tensor
    type: BlockType

    @property
    def shape(self) -> tuple[int, ...]:
        """Return (rows, columns) of the matrix, behind their number if there are several."""
        *rows, row_bytes = self.data.shape
        return *rows, row_bytes // self.type.num_bytes * self.type.block

    def narrow(self, axis: int, start: int, length: int) -> "Blocks":
        """Return the part [start, start + length) of `axis`. Raises ConfigError if it would cut a block."""
        if axis < self.data.dim() - 1:
            return Blocks(self.data.narrow(axis, start, length), self.type)
        block, num_bytes = self.type.block, self.type.num_bytes
        if start % block or length % block:
            raise ConfigError(
                f"{self.type.name} weights keep {block} columns in a block: columns {start} to "
                f"{start + length} cannot be one rank's part. Use a smaller tensor_parallel_size, or a file "
                "with smaller blocks."
            )
        return Blocks(
            self.data.narrow(axis, start // block * num_bytes, length // block * num_bytes), self.type
        )

    def index_select(self, axis: int, index: Tensor) -> "Blocks":
        """Return a copy of the rows `index`."""
        assert axis == 0, "columns of packed rows cannot be permuted"
        return Blocks(self.data.index_select(0, index), self.type)

    def to(self, device: torch.device) -> "Blocks":
        """Return the same blocks on `device`, contiguous."""
        return Blocks(self.data.to(device).contiguous(), self.type)


def blocks_of_one(matrix: Tensor) -> Blocks:
    """Return a contiguous matrix of plain numbers as blocks, over the same memory."""
    return Blocks(matrix.view(torch.uint8), TYPES_BY_NAME[_OF_ONE[matrix.dtype]])


def join(parts: list[Blocks], arena: Arena) -> Blocks:
    """Return the rows of matrices of one type and width, one below the other, in memory of `arena`.

    A single one stays where it is on a device, and if it is large: copying a head out of the file would delay
    the first token by a tenth of a second.
    """
    first = parts[0].data
    if len(parts) == 1 and (first.device.type != "cpu" or first.nbytes > _MOST_COPIED):
        return parts[0]
    rows, row_bytes = sum(len(part.data) for part in parts), first.shape[1]
    data = arena.empty((rows, row_bytes), torch.uint8, first.device)
    return Blocks(torch.cat([part.data for part in parts], out=data), parts[0].type)


def stack(parts: list[Blocks], arena: Arena) -> Blocks:
    """Return matrices of one type and shape, [1, rows, bytes per row] each, as one stack.

    It stays where the file is mapped if they are neighbours there.
    """
    first, step = parts[0].data, parts[0].data.nbytes
    shape = (len(parts), *first.shape[1:])
    begins = {part.data.untyped_storage().data_ptr() for part in parts}
    neighbours = (part.data.data_ptr() == first.data_ptr() + i * step for i, part in enumerate(parts))
    if len(begins) == 1 and all(neighbours):
        return Blocks(first.as_strided(shape, (step, *first.stride()[1:])), parts[0].type)
    data = arena.empty(shape, torch.uint8, first.device)
    return Blocks(torch.cat([part.data for part in parts], out=data), parts[0].type)
