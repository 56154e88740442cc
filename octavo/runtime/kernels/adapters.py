"""The adapter family: low-rank changes of products, another one for every token.

T = tokens, N = outputs, K = inputs. A projection of several parts (q, k, v) has a low rank for each.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo.runtime.transfer import Array, to_device

ENTRY = 6
"""Numbers of an entry: addresses of `down` and `up`, rank, parts, addresses of `factors` and `bias`; or 0."""


class LowRank(NamedTuple):
    """What one adapter changes of a product: x becomes x @ down.T @ up, part by part, and is added.

    down:    [parts * rank, K], contiguous; a part of lower rank ends with rows of zeros
    up:      [rank, N], contiguous, of the type of `down`; scaled
    parts:   1, or as many as the product has
    factors: [N] float32, then the sum without the model's bias is multiplied by it (DoRA)
    bias:    [N] float32, added in the end

    Of experts `down` and `up` have one axis more, in front.
    """

    down: Tensor
    up: Tensor
    parts: int = 1
    factors: Tensor | None = None
    bias: Tensor | None = None

    @property
    def rank(self) -> int:
        """Return the rank of each part."""
        return self.up.shape[-2]

    def on(self, device: torch.device) -> "LowRank":
        """Return it on `device`, in copies that the host does not wait for."""
        down, up = self.down.to(device, non_blocking=True), self.up.to(device, non_blocking=True)
        factors, bias = (
            None if part is None else part.to(device, non_blocking=True) for part in (self.factors, self.bias)
        )
        return LowRank(down, up, self.parts, factors, bias)

    def entries(self) -> Array:
        """Return the numbers by which kernels find it, a row for each expert."""
        ends = [0 if tensor is None else tensor.data_ptr() for tensor in (self.factors, self.bias)]
        first = np.array([self.down.data_ptr(), self.up.data_ptr(), self.rank, self.parts, *ends], np.int64)
        if self.down.dim() == 2:
            return first.reshape(1, -1)
        steps = np.array([self.down[0].nbytes, self.up[0].nbytes, 0, 0, 0, 0])
        made: Array = first + np.arange(len(self.down))[:, None] * steps
        return made

    def of(self, expert: int) -> "LowRank":
        """Return the change of one expert; it is the whole where there are none."""
        if self.down.dim() == 2:
            return self
        return self._replace(down=self.down[expert], up=self.up[expert])


@dataclass(slots=True)
class LowRankTable:
    """What the adapters in use change of one product, by slot; slot 0 has none.

    Kernels find everything by `entries`, which stays where it is: recorded and captured steps outlive
    adapters.

    entries: [slots * experts, ENTRY] int64 on the device
    experts: numbers of a slot; what kernels take for slots is then slot * experts + expert
    bounds:  [parts + 1] int32 on the device, where the parts of the product begin among its outputs
    """

    entries: Tensor
    bounds: Tensor
    dtype: torch.dtype
    """Of `down` and `up`."""
    kept_bounds: tuple[int, ...]
    """`bounds` on the host."""
    most_rank: int
    """Of a part; on a GPU no change has more."""
    experts: int = 1
    kept: dict[int, LowRank] = field(default_factory=dict)
    wholes: dict[int, Tensor] = field(default_factory=dict)
    """By slot: a matrix in the place of the model's, [N, K]. The reference reads both."""
    whole_entries: Tensor = field(init=False)
    """[slots] int64 on the device: their addresses, or 0."""

    def __post_init__(self) -> None:
        self.whole_entries = self.entries.new_zeros(len(self.entries) // self.experts)

    @property
    def is_used(self) -> bool:
        """Return True if an adapter in a slot changes the product."""
        return bool(self.kept or self.wholes)

    @property
    def num_outputs(self) -> int:
        """Return N."""
        return self.kept_bounds[-1]

    def put(self, slot: int, change: LowRank | None, whole: Tensor | None = None) -> None:
        """Let tokens of `slot` have this change, or this matrix, or none."""
        rows = np.zeros((self.experts, ENTRY), np.int64) if change is None else change.entries()
        first = slot * self.experts
        self.entries[first : first + self.experts] = to_device(rows, self.entries.device)
        self.whole_entries[slot] = 0 if whole is None else whole.data_ptr()
        self.kept.pop(slot, None)
        self.wholes.pop(slot, None)
        if change is not None:
            self.kept[slot] = change
        if whole is not None:
            self.wholes[slot] = whole


Group = Callable[[Tensor, int], Tensor]
"""Takes slots [T] int32 of a step's tokens and the number of slots; returns what AddLowRank reads of them."""

AddLowRank = Callable[[Tensor, Tensor, Tensor, LowRankTable, Tensor | None], None]
"""Takes x [T, K], out [T, N], changed in place, what Group made, a table, and the bias [N] that out holds.

x and out are token-strided; on a GPU the kernel that made `out` was launched right before. Sums are float32
throughout, in an order that depends on neither the other tokens nor the thread count (the reference: on the
other tokens).
"""

Replace = AddLowRank
"""Takes the same: outputs of tokens whose slot has a whole matrix become its products, bias and own bias."""

ChangeLookup = Callable[[Tensor, Tensor, Tensor, LowRankTable, float], None]
"""Takes ids [T] int64, their embeddings [T, H], changed in place, slots [T] int32, a table and a factor.

Of a token whose slot has a whole matrix [tokens, H] it leaves the row, times the factor; to others it adds
down[id] @ up, times the factor. Here `down` is [tokens, rank], `up` [rank, H]. An id of -1 changes nothing.
"""

MultiplyChanged = Callable[[Tensor, Tensor, Tensor | None, Tensor, LowRankTable], Tensor | None]
"""Takes x [T, K], a weight [N, K], its bias [N], what Group made and a table.

Returns the product as AddLowRank changes it, [T, N]; None where a kernel for both is no faster.
"""


def shares_of_inputs(inputs: int) -> int:
    """Return into how many sums a GPU's kernels divide an inner value, a power of two, by K alone."""
    return 1 << (max(1, min(16, inputs // 512)).bit_length() - 1)


@dataclass(frozen=True)
class AdapterKernels:
    """The kernels of adapters."""

    add_low_rank: AddLowRank
    replace: Replace
    change_lookup: ChangeLookup
    multiply: MultiplyChanged = lambda *given: None
    group: Group = lambda slots, num_slots: slots
