"""How kernels are launched: sizes of grids, kernels that begin before their inputs are there, counters.

Programmatic dependent launch. A kernel launched as `overlapped` may begin while its predecessor still runs.
So every program of a kernel of this folder that takes `PDL` calls `wait` before it touches memory that
another kernel reads or writes, and after that `release` where its successor may begin: late, because programs
that wait take the place of programs that work; a small kernel before a large one, at once. All kernels of a
chain wait before they release. So when a kernel begins, all but the one right before it are done: its writes
are safe from those, and before `wait` it may read what is not that one's: weights, lengths, block tables.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import driver

from octavo.base.cards import CARDS, Card, amd_card, nvidia_card

NUM_PROGRAMS = 4 * 132
"""One wave of small programs on the GPUs the kernels were tuned on."""
WAVE = 128
"""Large programs that occupy these."""
LEAST_INPUTS = 512
"""Of one part of a product whose inputs are shared out."""
GLUON_VERSIONS = "3.6.", "3.7."
"""Of Triton, with which kernels in Gluon were tried: it changes."""
_NUM_COUNTERS = 1 << 14  # never more: a captured graph keeps the address


def power_of_2(number: int) -> int:
    """Return the smallest power of two that is not smaller. Triton's own costs 3 µs a call on the host."""
    return 1 << (number - 1).bit_length()


def cdiv(number: int, size: int) -> int:
    """Return how many programs of `size` cover `number`."""
    return -(-number // size)


def splits_of_inputs(num_tiles: int, k: int) -> int:
    """Return in how many parts a product of `num_tiles` tiles and k inputs occupies the device."""
    return max(1, min(WAVE // num_tiles, k // LEAST_INPUTS))


@functools.cache
def card() -> Card | None:
    """Return what the GPU has that kernels are compiled for; None in Triton's interpreter."""
    if triton.knobs.runtime.interpret:
        return None
    target = driver.active.get_current_target()
    return amd_card(target.arch) if target.backend == "hip" else nvidia_card(*divmod(target.arch, 10))


@functools.cache
def overlapped() -> dict[str, Any]:
    """Return arguments of a launch that may begin early, where the device can do that."""
    known = card()
    able = known is not None and known.has_copy_engine
    return {"PDL": True, "launch_pdl": True} if able else {"PDL": False}


def has_copy_engine() -> bool:
    """Return True if tiles can be fetched by descriptors (TMA); Triton's interpreter does the same."""
    known = card()
    return known is None or known.has_copy_engine


def has_gluon() -> bool:
    """Return True if kernels in Gluon run here, which are written for Hopper."""
    return has_warp_groups() and triton.__version__.startswith(GLUON_VERSIONS)


def has_matrix_units() -> bool:
    """Return True if products of tiles are made by tensor cores; Triton's interpreter takes any tiles."""
    known = card()
    return known is None or known.has_matrix_units


def has_tf32() -> bool:
    """Return True if tensor cores multiply float32, rounded."""
    known = card()
    return known is None or known.has_tf32


def has_warp_groups() -> bool:
    """Return True on Hopper, where tiles were measured."""
    known = card()
    return known is not None and known.has_warp_groups


def reads_shared() -> bool:
    """Return True if tensor cores read tiles from shared memory, not from registers."""
    known = card()
    return known is None or known.shared_bytes >= CARDS["sm_90"].shared_bytes


def fits(num_stages: int, stage_bytes: int, other_bytes: int = 0) -> bool:
    """Return True if tiles of a loop in so many stages fit the card's shared memory, beside other tiles.

    Where tensor cores read registers, Triton keeps one stage less; where they read shared memory, it keeps
    all, and on Blackwell other operands, too, of two stages at most in what was compiled.
    """
    known = card()
    if known is None:
        return True
    kept = max(1, num_stages - 1)
    if reads_shared():
        kept = num_stages if known.has_warp_groups else num_stages + 2
    return kept * stage_bytes + other_bytes <= known.shared_bytes


def stages(wanted: int, stage_bytes: int, other_bytes: int = 0) -> int:
    """Return how many stages of a loop's tiles fit, 1 at least."""
    return next((n for n in range(wanted, 1, -1) if fits(n, stage_bytes, other_bytes)), 1)


@triton.jit
def wait(PDL: tl.constexpr):
    """Wait until all earlier kernels are done and their writes visible."""
    if PDL:
        gdc_wait()


@triton.jit
def release(PDL: tl.constexpr):
    """Let the next kernel begin, once all programs have come here."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def is_last(counter, number):
    """Return True in the last of `number` programs to come here, which sees what the others stored.

    The counter is left at 0, as it was found.
    """
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel") == number - 1
    if last:
        tl.store(counter, 0)
    return last


class Counters:
    """Zeros for `is_last`, which leaves them zero. Kernels on one stream share them."""

    def __init__(self) -> None:
        self._by_device: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device, number: int) -> Tensor:
        """Return at least `number` of them. The first call on a device must not be captured into a graph."""
        assert number <= _NUM_COUNTERS, number
        if device not in self._by_device:
            self._by_device[device] = torch.zeros(_NUM_COUNTERS, dtype=torch.int32, device=device)
        return self._by_device[device]
