"""A `PackedLayout` derives the layout of a stored tensor (words, scales, zeros, order) from its matrix's.

Quantized checkpoints keep a matrix [outputs, inputs] as several tensors, whose axes count words of several
weights, groups that share a number, or the whole axis once. Shapes and a rank's part follow from that.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.base.errors import ConfigError
from octavo.runtime.quantization.parameter import Layout, Shard


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of a stored tensor: each `entries` of its entries serve `values` weights; values 0 = all.

    is_word:  an entry cannot be cut. Of groups, a rank keeps those that its part touches,
    is_uncut: or all of them
    """

    values: int = 1
    entries: int = 1
    is_word: bool = False
    is_uncut: bool = False

    def cut(self, shard: Shard) -> Shard:
        """Return the entries that serve the weights of `shard`. Raises ConfigError inside a word."""
        end = shard.start + shard.size
        if self.is_word and end < shard.full and (shard.start % self.values or end % self.values):
            raise ConfigError(
                f"{self.values} weights are stored in a word: {shard.start} to {end} of {shard.full} cannot "
                "be one rank's part. Use a smaller tensor_parallel_size."
            )
        if self.is_uncut:
            return Shard(shard.name, self.count(shard.full), 0, self.count(shard.full))
        start = self.first(shard.start)
        return Shard(shard.name, self.count(shard.full), start, self.count(end) - start)

    def count(self, size: int) -> int:
        """Return how many entries serve the first `size` weights."""
        return -(-size * self.entries // self.values) if self.values else 1

    def entry_of(self, shard: Shard) -> Tensor:
        """Return which of the entries that `cut` keeps serves each weight of the shard, [size] int64."""
        places = torch.arange(shard.start, shard.start + shard.size) * self.entries
        entries = places // self.values if self.values else torch.zeros_like(places)
        return entries if self.is_uncut else entries - self.first(shard.start)

    def first(self, place: int) -> int:
        """Return the entry that serves the weight at `place`."""
        return place * self.entries // self.values if self.values else 0


EACH, WHOLE = Axis(), Axis(0)


def words(bits: int) -> Axis:
    """Return the axis of 32-bit words in a stream of weights of `bits` bits."""
    return Axis(32, bits, True) if 32 % bits else Axis(32 // bits, 1, True)


def groups_of(size: int, is_uncut: bool = False) -> Axis:
    """Return the axis of groups of `size` weights, -1 = all of them."""
    return Axis(size, is_uncut=is_uncut) if size > 0 else WHOLE


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """The axes of a stored tensor: [outputs, inputs], or [inputs, outputs] if transposed."""

    outputs: Axis = EACH
    inputs: Axis = EACH
    is_transposed: bool = False

    def of(self, matrix: Layout) -> Layout:
        """Return the tensor's layout for a matrix of one shard [outputs, inputs]. Raises ConfigError."""
        axes = self.outputs, self.inputs
        split = axes[matrix.split_axis]
        other = axes[1 - matrix.split_axis]
        made = Layout(
            tuple(split.cut(shard) for shard in matrix.shards),
            tuple(other.count(size) for size in matrix.others),
            matrix.split_axis,
            matrix.stack_axis,
        )
        if not self.is_transposed:
            return made
        return replace(made, split_axis=1 - made.split_axis, stack_axis=1 - made.stack_axis)
