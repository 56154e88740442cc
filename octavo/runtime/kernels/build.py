"""Compiles the CPU kernels, once per machine, into octavo's cache folder.

`cpu/library.py` asks for the library at construction; `python -m octavo.runtime.kernels.build` makes it
ahead. Its name holds a digest of sources, options and CPU features, and one of the compiler: what is in a
cache folder that was copied from another machine is never loaded. Without a compiler, one line says so and
the twins are used.
"""

import fcntl
import hashlib
import platform
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from octavo.base import env, log
from octavo.base.log import get_logger

logger = get_logger(__name__)

_SOURCES = Path(__file__).parent / "cpu"
_OPTIONS = ["-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fPIC", "-pthread", "-Wno-psabi"]
_TIMEOUT_S = 300


def shared_library() -> Path | None:
    """Path of the compiled kernels, made if need be; None, with a line in the log, if they cannot be made."""
    folder = env.cache_dir() / "kernels"
    command = shlex.split(env.compiler())
    try:
        version = _run([*command, "--version"])
    except (OSError, subprocess.SubprocessError) as error:
        return _any_library(folder, error)
    path = folder / f"{_prefix()}-{_digest(version.encode())}.so"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                _compile(command, path)
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("CPU kernels could not be compiled; slow torch code runs instead. %s", _reason(error))
        return None
    return path


def _any_library(folder: Path, error: Exception) -> Path | None:
    """No compiler: a library that any compiler made of these sources for this CPU will do."""
    found = sorted(folder.glob(f"{_prefix()}-*.so"))
    if found:
        return found[0]
    logger.warning(
        "No C++ compiler (%s): slow torch code runs instead of CPU kernels. Install g++ or set CXX. (%s)",
        env.compiler(),
        _reason(error),
    )
    return None


def _compile(command: list[str], path: Path) -> None:
    """Compile all sources side by side, link, and let the library appear under its name at once."""
    logger.info("Compiling CPU kernels into %s", path)
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        sources = sorted(_SOURCES.glob("*.cpp"))
        objects = [f"{work}/{source.stem}.o" for source in sources]
        with ThreadPoolExecutor() as pool:
            compile_one = [*command, *_OPTIONS, "-c"]
            list(pool.map(lambda s, o: _run([*compile_one, str(s), "-o", o]), sources, objects))
        _run([*command, "-shared", "-pthread", *objects, "-o", f"{work}/library.so"])
        Path(work, "library.so").replace(path)


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S).stdout


def _prefix() -> str:
    """Digest of what the library is made of and of the CPU it is made for."""
    files = sorted(f for f in _SOURCES.iterdir() if f.suffix in {".h", ".cpp"})
    content = b"".join(f.name.encode() + f.read_bytes() for f in files)
    return _digest(content, shlex.join(_OPTIONS).encode(), _cpu_features().encode())


def _cpu_features() -> str:
    """The instruction sets of this CPU, as the kernel lists them."""
    names = ("flags", "Features")
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    features = next((line for line in lines if line.startswith(names)), "")
    return f"{platform.machine()} {features}"


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _reason(error: Exception) -> str:
    """The error, with the beginning of the compiler's own words."""
    words = getattr(error, "stderr", None) or ""
    return f"{error} {words[:500]}".strip()


def main() -> int:
    """Build ahead of the first use; exit status 0 also without a compiler, since octavo runs without."""
    log.setup()
    if path := shared_library():
        logger.info("CPU kernels: %s", path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
