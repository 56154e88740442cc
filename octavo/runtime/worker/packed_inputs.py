"""`PackedInputs`: what the host knows of a step, packed into one buffer of int64; `Packing` says where.

The host writes the buffer, and the device reads its copy of it. Used by CUDAGraphs.
"""

from math import prod
from typing import Annotated, Any, Generic, NamedTuple, TypeVar, get_type_hints

import numpy as np
import torch

from octavo.runtime.transfer import Array

T = TypeVar("T", Array, torch.Tensor)


class PackedInputs(NamedTuple, Generic[T]):
    """The parts in their order in memory, each with its axis and type. `BeginStep` reads the first two.

    of each token: its place in the state's token_ids, its position, its slot in the cache by group
    of each row:   row in the state, output position, place of the token it samples, length in the cache
    bounds:        the rows' first tokens, and their end
    """

    places: Annotated[T, "tokens", "int64"]
    rows: Annotated[T, "rows", "int64"]
    positions: Annotated[T, "tokens", "int64"]
    cache_slots: Annotated[T, "groups x tokens", "int64"]
    output_positions: Annotated[T, "rows", "int64"]
    targets: Annotated[T, "rows", "int64"]
    kv_lens: Annotated[T, "rows", "int32"]
    bounds: Annotated[T, "rows + 1", "int32"]


_FIELDS: list[tuple[str, str]] = [
    hint.__metadata__ for hint in get_type_hints(PackedInputs, include_extras=True).values()
]


class Packing:
    """The layout of one shape's inputs. size: of the buffer; every part begins at a whole int64."""

    def __init__(self, num_tokens: int, num_rows: int, num_groups: int) -> None:
        shapes = {
            "tokens": (num_tokens,),
            "rows": (num_rows,),
            "rows + 1": (num_rows + 1,),
            "groups x tokens": (num_groups, num_tokens),
        }
        self.size = 0
        self._parts: list[tuple[slice, str, tuple[int, ...]]] = []
        for axis, dtype in _FIELDS:
            shape = shapes[axis]
            end = self.size + -(-prod(shape) * np.dtype(dtype).itemsize // 8)
            self._parts.append((slice(self.size, end), dtype, shape))
            self.size = end

    def split(self, buffer: T) -> PackedInputs[T]:
        """Return the parts of `buffer`, [size] int64, as views."""
        return PackedInputs(*(_view(buffer[place], dtype, shape) for place, dtype, shape in self._parts))


def _view(part: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    if dtype != "int64":
        part = part.view(getattr(torch if isinstance(part, torch.Tensor) else np, dtype))[: prod(shape)]
    return part if len(shape) == 1 else part.reshape(shape)
