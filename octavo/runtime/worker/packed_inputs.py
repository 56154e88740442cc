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
    adapters:      slot of each token's adapter, in steps that have some
    of each row of a chained step: tokens that the host counts, -1 = it knows the number; its draft, UNTOLD =
                   what stands there; drafts that count as true, -1 = those that are; guesses behind it; the
                   first row of its request
    heads:         first row of each request of a chained step
    """

    places: Annotated[T, "tokens", "int64"]
    rows: Annotated[T, "rows", "int64"]
    positions: Annotated[T, "tokens", "int64"]
    cache_slots: Annotated[T, "groups x tokens", "int64"]
    output_positions: Annotated[T, "rows", "int64"]
    targets: Annotated[T, "rows", "int64"]
    kv_lens: Annotated[T, "rows", "int32"]
    bounds: Annotated[T, "rows + 1", "int32"]
    adapters: Annotated[T, "changed tokens", "int32"]
    num_known: Annotated[T, "chained rows", "int64"]
    drafts: Annotated[T, "chained rows", "int64"]
    num_taken: Annotated[T, "chained rows", "int64"]
    num_wanted: Annotated[T, "chained rows", "int64"]
    firsts: Annotated[T, "chained rows", "int64"]
    heads: Annotated[T, "chained requests", "int64"]


_FIELDS: list[tuple[str, str]] = [
    hint.__metadata__ for hint in get_type_hints(PackedInputs, include_extras=True).values()
]


class Packing:
    """The layout of one shape's inputs. size: of the buffer; every part begins at a whole int64."""

    def __init__(
        self, num_tokens: int, num_rows: int, num_groups: int, *, is_changed: bool, num_chained: int = 0
    ) -> None:
        """num_chained: requests of a chained step"""
        shapes = {
            "tokens": (num_tokens,),
            "changed tokens": (num_tokens * is_changed,),
            "rows": (num_rows,),
            "chained rows": (num_rows if num_chained else 0,),
            "chained requests": (num_chained,),
            "rows + 1": (num_rows + 1,),
            "groups x tokens": (num_groups, num_tokens),
        }
        self.size = 0
        self._places: list[slice] = []
        self._narrow: list[tuple[int, int]] = []
        self._shapes: list[tuple[int, tuple[int, ...]]] = []
        for index, (axis, dtype) in enumerate(_FIELDS):
            shape = shapes[axis]
            count = prod(shape)
            if dtype == "int32":
                self._narrow.append((index, count))
            if len(shape) > 1:
                self._shapes.append((index, shape))
            end = self.size + (count if dtype == "int64" else -(-count // 2))
            self._places.append(slice(self.size, end))
            self.size = end

    def split(self, buffer: T) -> PackedInputs[T]:
        """Return the parts of `buffer`, [size] int64, as views."""
        int32: Any = torch.int32 if isinstance(buffer, torch.Tensor) else np.int32
        parts = [buffer[place] for place in self._places]
        for index, count in self._narrow:
            parts[index] = parts[index].view(int32)[:count]
        for index, shape in self._shapes:
            parts[index] = parts[index].reshape(shape)
        return PackedInputs(*parts)
