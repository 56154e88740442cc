"""What GPUs have, in one table: it decides the default dtype, and which kernels with which tiles are chosen.

Sources: NVIDIA's CUDA C++ Programming Guide, "Compute Capabilities"; AMD's guides to the instruction sets of
CDNA 2, CDNA 3 and RDNA 3.
"""

from typing import NamedTuple

from octavo.base.errors import ConfigError


class Card(NamedTuple):
    """One kind of GPU."""

    name: str
    """As its compiler calls it: sm_90, gfx942."""
    shared_bytes: int
    """Of shared memory (LDS) that one program may take."""
    warp_size: int = 32
    has_matrix_units: bool = True
    """Triton's products use tensor cores."""
    has_tf32: bool = True
    """They multiply float32, rounded."""
    has_bfloat16: bool = True
    has_fp8: bool = False
    """E4M3 in conversions and products."""
    has_int8: bool = True
    """Products of bytes on tensor cores."""
    has_copy_engine: bool = False
    """Tiles are fetched by descriptors (TMA), clusters share them, and a launch may begin early (PDL)."""
    has_warp_groups: bool = False
    """Products of four warps from shared memory (WGMMA), which the kernels in Gluon are written for."""
    most_stages: int = 8
    """Of the loop over keys: of more, Triton 3.6 makes nothing for RDNA 3."""


_KIB = 1 << 10
CARDS = {
    card.name: card
    for card in (
        Card("sm_75", 64 * _KIB, has_matrix_units=False, has_tf32=False, has_bfloat16=False, has_int8=False),
        Card("sm_80", 163 * _KIB),
        Card("sm_86", 99 * _KIB),
        Card("sm_87", 163 * _KIB),
        Card("sm_89", 99 * _KIB, has_fp8=True),
        Card("sm_90", 227 * _KIB, has_fp8=True, has_copy_engine=True, has_warp_groups=True),
        Card("sm_100", 227 * _KIB, has_fp8=True, has_copy_engine=True),
        Card("sm_103", 227 * _KIB, has_fp8=True, has_copy_engine=True),
        Card("sm_120", 99 * _KIB, has_fp8=True, has_copy_engine=True),
        Card("sm_121", 99 * _KIB, has_fp8=True, has_copy_engine=True),
        Card("gfx90a", 64 * _KIB, warp_size=64, has_tf32=False),
        Card("gfx942", 64 * _KIB, warp_size=64, has_tf32=False),
        Card("gfx1100", 64 * _KIB, has_tf32=False, most_stages=3),
    )
}


def nvidia_card(major: int, minor: int) -> Card:
    """Return the card of a compute capability; one that is not listed has what the next lower one has.

    Raises ConfigError below 7.5.
    """
    capability = major * 10 + minor
    known = [int(name.removeprefix("sm_")) for name in CARDS if name.startswith("sm_")]
    if capability < min(known):
        raise ConfigError(
            f"This GPU has compute capability {major}.{minor}; octavo's kernels need 7.5 or more. Use "
            "device='cpu'."
        )
    return CARDS[f"sm_{max(number for number in known if number <= capability)}"]


def amd_card(arch: str) -> Card:
    """Return the card of an architecture by AMD's name ("gfx942:sramecc+"). Raises ConfigError."""
    name = arch.partition(":")[0]
    if name in CARDS:
        return CARDS[name]
    if name.startswith(("gfx11", "gfx12")):
        return CARDS["gfx1100"]
    if name == "gfx950":
        return CARDS["gfx942"]
    known = ", ".join(name for name in CARDS if name.startswith("gfx"))
    raise ConfigError(
        f"This GPU is a {name}; octavo's kernels are made for {known}, gfx11 and gfx12. Use device='cpu'."
    )
