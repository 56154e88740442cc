"""Object files of the CPU kernels that tests compile: each is made once for all tests of a session."""

import fcntl
import hashlib
import os
import shutil
from pathlib import Path

import pytest

from octavo.runtime.kernels import build

_OF_LINKING = ("-static-libstdc++", "-Wl,", "-s")


def share_objects(patch: pytest.MonkeyPatch, temporary: pytest.TempPathFactory) -> None:
    """Compile with little optimization; take what another test, perhaps of another worker, has compiled."""
    base = temporary.getbasetemp()
    folder = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "kernel-objects"
    folder.mkdir(exist_ok=True)
    really = build._run

    def run(command: list[str]) -> str:
        if "-c" not in command:
            return really(command)
        made, place = Path(command[-1]), command.index("-c")
        command = [*command[:place], "-O1", *command[place:]]
        what = [word for word in command[:-1] if not word.startswith(_OF_LINKING)]
        known = folder / f"{hashlib.sha256(' '.join(what).encode()).hexdigest()}.o"
        with known.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not known.exists():
                really(command)
                shutil.copyfile(made, known.with_suffix(".part"))
                known.with_suffix(".part").replace(known)
        shutil.copyfile(known, made)
        return ""

    patch.setattr(build, "_run", run)
