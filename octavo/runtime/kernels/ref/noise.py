"""Sampling noise as a pure function of (seed, output position); and what else a row is drawn by.

A generator's state would tie a token to the batch it was drawn in; a counter does not: a request draws the
same numbers after preemption, in any batch and any order of steps.
Source: splitmix64, Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
"""

import torch
from torch import Tensor

GAMMA = 0x9E3779B97F4A7C15 - 2**64  # odd, near 2**64 / golden ratio; written as the int64 of the same bits
MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
MIX_2 = 0x94D049BB133111EB - 2**64


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return a number in [0, 1) per row: the top 53 bits of splitmix64's output `position` for its seed.

    The seed is mixed first, so that neighbouring seeds (the children of n > 1) are unrelated streams.
    seeds, positions: [rows] int64; returns [rows] float64
    """
    bits = _mix(_mix(seeds + GAMMA) + (positions + 1) * GAMMA)
    return _shift_right(bits, 11).double() * 2.0**-53


def row_limits(rows: Tensor, positions: Tensor, seeds: Tensor, limits: Tensor) -> Tensor:
    """See sampling.RowLimits."""
    return torch.cat([uniform(seeds[rows, 0], positions)[None], limits[rows].T])


def _mix(state: Tensor) -> Tensor:
    state = (state ^ _shift_right(state, 30)) * MIX_1
    state = (state ^ _shift_right(state, 27)) * MIX_2
    return state ^ _shift_right(state, 31)


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Shift logically: int64's own shift would copy the sign."""
    return (bits >> count) & ((1 << (64 - count)) - 1)
