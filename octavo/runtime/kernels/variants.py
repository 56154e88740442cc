"""Libraries of CPU kernels that a platform wheel brings, one per instruction set; `build` chooses and proves.

Each is made for a baseline that many CPUs have in common, where `build` alone would compile for this one.
"""

import platform
from pathlib import Path
from typing import NamedTuple

from octavo.base.errors import ConfigError

FOLDER = Path(__file__).parent / "cpu" / "built"
_AVX2 = "avx avx2 bmi1 bmi2 f16c fma abm movbe"
_AVX512 = f"{_AVX2} avx512f avx512bw avx512cd avx512dq avx512vl avx512_vnni"
_DOTPROD = "asimd atomics asimdrdm asimdhp asimddp"


class Variant(NamedTuple):
    """What the compiler may use, and what a CPU must have, in the words of Linux."""

    options: tuple[str, ...]
    features: str

    def runs_on(self, features: str) -> bool:
        """Return whether a CPU with these features can run it."""
        return set(self.features.split()) <= set(features.split())


_X86_64 = {
    "amx": Variant(
        ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
        f"{_AVX512} avx512_bf16 amx_tile amx_bf16",
    ),
    "avx512_bf16": Variant(("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"), f"{_AVX512} avx512_bf16"),
    "avx512": Variant(("-march=x86-64-v4", "-mavx512vnni"), _AVX512),
    "avx2": Variant(("-march=x86-64-v3",), _AVX2),
}
_AARCH64 = {
    "bf16": Variant(("-march=armv8.2-a+fp16+dotprod+i8mm+bf16",), f"{_DOTPROD} i8mm bf16"),
    "i8mm": Variant(("-march=armv8.2-a+fp16+dotprod+i8mm",), f"{_DOTPROD} i8mm"),
    "dotprod": Variant(("-march=armv8.2-a+fp16+dotprod",), _DOTPROD),
    "neon": Variant(("-march=armv8-a",), "asimd"),
}
OF_MACHINE = {"x86_64": _X86_64, "aarch64": _AARCH64, "arm64": _AARCH64}
VARIANTS = OF_MACHINE.get(platform.machine(), {})
"""Those of this machine, the best first."""


def allowed(isa: str) -> dict[str, Variant]:
    """Return the variants up to `isa`, the best first; "": all. Raises ConfigError for an unknown one."""
    if isa and isa not in VARIANTS:
        raise ConfigError(f"OCTAVO_CPU_ISA is {isa}; it may be {', '.join(VARIANTS)}.")
    names = list(VARIANTS)
    return {name: VARIANTS[name] for name in names[names.index(isa) if isa else 0 :]}


def library(folder: Path, name: str, sources: str) -> Path:
    """Return where a variant's library is; sources: the digest of what it was made of."""
    return folder / f"{name}-{sources}.so"
