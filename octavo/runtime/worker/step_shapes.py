"""The shapes that captured steps are padded to, used by `CUDAGraphs`."""

from bisect import bisect_left
from typing import NamedTuple

from octavo.runtime.lora.sites import Reach

FEWEST_TOKENS = 64
"""Of chunks; more than there are chunks: as many tokens as rows would be a decoding step."""
CHUNKS = (8, 32)
AT_ONCE, _MOST_USUAL = 5, 256
"""Sizes that are captured before a start is over, and rows up to which all sizes are usual."""


class Shape(NamedTuple):
    """singles: rows of one token each, which come first; chunks: rows behind them, with `tokens` in all."""

    singles: int
    chunks: int = 0
    tokens: int = 0
    common_start: bool = False
    """As in ForwardBatch."""
    reach: Reach = Reach.NOTHING
    """As in Work; what is captured without adapters knows nothing of them."""
    num_chained: int = 0
    """Requests, in steps that verify drafts on the device; 0 in others."""

    @property
    def num_rows(self) -> int:
        """Of both kinds."""
        return self.singles + self.chunks

    @property
    def num_tokens(self) -> int:
        """Of both kinds."""
        return self.singles + self.tokens


def step_sizes(most: int) -> list[int]:
    """List the sizes that decoding steps of up to `most` requests are padded to: 1, 2, 4, 8, 16, 24 …

    From 384 on multiples of 24, away from cuBLAS's worst holes (448 rows of an 8B take 40 % more than 456).
    """
    sizes, size = [], 1
    while size < most:
        sizes.append(size)
        size += size if size < 8 else 8 if size < 384 else max(24, size // 512 * 16)
    return [*sizes, most]


def first_sizes(sizes: list[int]) -> list[int]:
    """Return the sizes that between them use every kernel, the largest first: they share memory best so.

    Kernels change where a size passes 2^k or 3 * 2^k requests.
    """
    return sorted({size for size in sizes if size // (size & -size) in (1, 3)} | {sizes[-1]}, reverse=True)


def trial_shapes(sizes: list[int]) -> list[Shape]:
    """List steps of prompts, alone and beside decoding, and of decoding in sizes with own kernels."""
    beside = (0, singles_of(sizes[-1])[-1])
    prompts = [Shape(singles, CHUNKS[0], FEWEST_TOKENS) for singles in beside]
    return [*prompts, *map(Shape, first_sizes(sizes))]


def usual_sizes(sizes: list[int]) -> list[int]:
    """Return the sizes that requests will need, the largest and the smallest first: so many `AT_ONCE`."""
    usual = sizes[: bisect_left(sizes, _MOST_USUAL) + 1]
    return list(dict.fromkeys((sizes[-1], *usual[: AT_ONCE - 1], *first_sizes(sizes), *usual)))


def singles_of(most: int) -> list[int]:
    """List what single rows beside chunks are padded to: few, as each comes with many numbers of tokens."""
    return [0, *(8 << i for i in range(max(1, (most - 1).bit_length() - 2)))]


def padded_tokens(number: int) -> int:
    """Return the next number of tokens of chunks, at most a quarter more from 128 on."""
    unit = max(FEWEST_TOKENS, 1 << max(0, number.bit_length() - 3))
    return -(-number // unit) * unit
