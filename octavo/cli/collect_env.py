"""Print versions and hardware, to be pasted into a bug report: without keys, the home folder as ~."""

import argparse
import platform
from pathlib import Path

from octavo.base import env
from octavo.base.cores import usable_cores
from octavo.cli import machine
from octavo.version import __version__


def configure(parser: argparse.ArgumentParser) -> None:
    """There are no arguments."""


def run(args: argparse.Namespace) -> int:
    """Print the table."""
    total, available = machine.memory_bytes()
    rows = {
        "octavo": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "system": platform.platform(),
        **machine.package_versions(),
        "compiler": machine.compiler() or "none found",
        "cpu": machine.cpu_model(),
        "cpu flags": " ".join(machine.cpu_flags()) or "none known",
        "cores": str(usable_cores()),
        "memory": f"{machine.in_gib(total)}, available {machine.in_gib(available)}",
        "gpu": "; ".join(machine.gpus()) or "none",
        "cache": str(env.cache_dir()),
        "environment": " ".join(env.settings()) or "nothing set",
    }
    home = str(Path.home())
    for name, value in rows.items():
        print(f"{name:<12} {value.replace(home, '~') if len(home) > 1 else value}")
    return 0
