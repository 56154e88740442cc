"""Hatch's build hook: with OCTAVO_WHEEL_KERNELS=1 the wheel has compiled CPU kernels, and a platform's tag.

`make wheel` runs it. The tag's glibc is the newest that a symbol of a library asks for; beside it they need
libgcc_s of GCC 4 at most, which every manylinux has. OCTAVO_WHEEL_TARGET is what CXX makes code for if
that is not this machine: linux-x86_64, linux-aarch64, macos-arm64.
"""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelWheel(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable" or os.environ.get("OCTAVO_WHEEL_KERNELS") != "1":
            return
        sys.path.insert(0, self.root)
        from octavo.runtime.kernels.build import make_variants

        folder = Path(self.root, "build", "kernels")
        folder.mkdir(parents=True, exist_ok=True)
        system, machine = target()
        made = make_variants(folder, system, machine)
        place = "octavo/runtime/kernels/cpu/built"
        build_data["force_include"] |= {str(path): f"{place}/{path.name}" for path in made}
        build_data["pure_python"] = False
        oldest = "macosx_11_0" if system == "macos" else f"manylinux_2_{oldest_glibc(made)}"
        build_data["tag"] = f"py3-none-{oldest}_{machine}"


def target() -> tuple[str, str]:
    """What the wheel is for: its system, and the machine as tags call it."""
    here = f"{'macos' if sys.platform == 'darwin' else 'linux'}-{platform.machine()}"
    system, _, machine = (os.environ.get("OCTAVO_WHEEL_TARGET") or here).partition("-")
    return system, machine


def oldest_glibc(libraries: list[Path]) -> int:
    """The minor version of glibc 2 that all of them load with. Raises ValueError for other needs."""
    symbols = subprocess.run(
        ["readelf", "--dyn-syms", "--wide", *map(str, libraries)], capture_output=True, text=True, check=True
    )
    needs = set(re.findall(r"@([A-Z]+_[\d.]+)", symbols.stdout))
    if others := {need for need in needs if not need.startswith(("GLIBC_2.", "GCC_3.", "GCC_4."))}:
        raise ValueError(f"The kernels need {', '.join(sorted(others))}: no manylinux tag is true.")
    return max(int(need.split(".")[1]) for need in needs if need.startswith("GLIBC_2."))
