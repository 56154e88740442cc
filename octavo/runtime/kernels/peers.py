"""The peer family: sums and choices over memory that ranks read from each other."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from octavo.runtime.kernels.sampling import Choice


class PeerMemory(NamedTuple):
    """Memory of every rank of a group, which all of them can read and write.

    regions:      [size] int64, the addresses of what the ranks write for each other
    flags:        [size] int64, the addresses of [MOST_PROGRAMS, size] int32, zero at first: how far ranks are
    turns:        [MOST_PROGRAMS] int32, zero at first: how often each program of this rank's kernels came
    region_bytes: what one program has for one message, and for the sum of it
    """

    rank: int
    size: int
    regions: Tensor
    flags: Tensor
    turns: Tensor
    region_bytes: int

    def holds(self, x: Tensor, *, by_rows: bool = False) -> bool:
        """Return True if there is space for x. by_rows: programs take whole ones"""
        row = x.shape[-1] if by_rows else PIECE
        rows = -(-x.numel() // (row * MOST_PROGRAMS))
        parts = -(-row // (ALIGNED * self.size)) * ALIGNED * self.size
        return rows * (parts + row) * x.element_size() <= self.region_bytes


ALIGNED = 8
"""Numbers at once, of which ranks add up whole ones."""
MOST_PROGRAMS = 128
NUM_REGIONS, FIRST_MAIL = 4, 2
"""Of a program: what others read, in turns; from FIRST_MAIL on what they write, in turns, first all ones."""
PIECE = 4096
"""Numbers that a program takes of a flat message at once, at most."""


class Sum(Protocol):
    """The sum over the ranks."""

    def __call__(self, memory: PeerMemory, x: Tensor, *, two_shots: bool) -> Tensor:
        """Return the sum of x in float32, rank by rank, rounded once: the same bits on every rank.

        x:         of the same shape on all ranks, contiguous; the memory `holds` it
        two_shots: every rank adds up its part and reads the others', instead of all of it; the same bits
        """


class SumAddNorm(Protocol):
    """`Sum`, then norms.AddNorm, in one kernel."""

    def __call__(
        self, memory: PeerMemory, x: Tensor, weight: Tensor, eps: float, residual: Tensor, *, two_shots: bool
    ) -> tuple[Tensor, Tensor]:
        """Return, to the bit, what AddNorm returns for `Sum` of x [T, size]. residual: token-strided"""


class Gather(Protocol):
    """What every rank has."""

    def __call__(self, memory: PeerMemory, x: Tensor) -> Tensor:
        """Return x of every rank: [size, *x.shape]. x: as in `Sum`"""


class ChooseAmong(Protocol):
    """The greedy choice from logits that ranks have parts of."""

    def __call__(self, memory: PeerMemory, choice: Choice, start: int) -> Choice:
        """Return the choice with the largest logit; of equal ones the lowest id.

        choice: of each rank from its part, which begins at the id `start`
        """


@dataclass(frozen=True)
class PeerKernels:
    """The kernels over peer memory. All ranks call the same one, with the same shapes."""

    sum: Sum
    sum_add_norm: SumAddNorm
    gather: Gather
    choose: ChooseAmong
