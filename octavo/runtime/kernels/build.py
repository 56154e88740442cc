"""Finds the CPU kernels: what a platform wheel has brought, or compiled once per machine into octavo's cache.

`cpu/library.py` asks for the library at construction; `python -m octavo.runtime.kernels.build` makes it
ahead. Its name holds a digest of sources, options and CPU features, and one of the compiler: what is in a
cache folder that was copied from another machine is never loaded. Without a compiler, one line says so and
the references are used.
"""

import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from octavo.base import env, log
from octavo.base.errors import ConfigError
from octavo.base.log import get_logger
from octavo.base.ownership import is_trusted
from octavo.runtime.kernels import variants
from octavo.runtime.kernels.cpu_features import cpu_features

logger = get_logger(__name__)

_SOURCES = Path(__file__).parent / "cpu"
_OPTIONS = ["-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-pthread", "-Wno-psabi"]
_LINKING = {
    "linux": ("-static-libstdc++", "-Wl,--exclude-libs,ALL", "-Wl,--gc-sections", "-s"),
    "macos": ("-Wl,-dead_strip",),
}
"""Of a wheel's library. libstdc++ goes into it: a wheel may not count on that of another machine, and what of
it is not used asks for a newer glibc. macOS has one that all programs use."""
_MARCHES = {"x86_64": ("native", "x86-64-v3"), "aarch64": (), "arm64": ()}.get(
    platform.machine(), ("native",)
)
"""The second where what the compiler makes for this very CPU does not prove right: AVX2 and no more. On ARM
the variants that the CPU has: compilers disagree about what is native to it."""
_PROOF = "octavo.runtime.kernels.cpu.proof"
_TIMEOUT_S = 1200
"""Of one compilation or proof; on a busy machine a file takes minutes."""


def shared_library(snapshot: Path | None = None) -> Path | None:
    """Return the path of the kernels, compiled if need be; None, and a line in the log, if they cannot be.

    snapshot: a folder that may have them

    Raises ConfigError for a cache that others can write to: they could run code here.
    """
    folder = env.cache_dir() / "kernels"
    level, reason = chosen_level()
    logger.info("CPU kernels use %s: %s", level, reason)
    if snapshot is not None and (kept := snapshot / f"{_prefix()}.so").exists():
        _check(kept)
        return kept
    if (shipped := _shipped_library(folder)) is not None:
        return shipped
    if folder.is_symlink() or folder.exists():
        _check(folder)
    path = _library_in(folder)
    if path is not None:
        _check(path)
    return path


def keep(folder: Path) -> None:
    """Copy the kernels to a snapshot, if there are any."""
    if not env.kernels_disabled() and (path := shared_library()) is not None:
        shutil.copyfile(path, folder / f"{_prefix()}.so")


def chosen_level() -> tuple[str, str]:
    """Return the instruction set that kernels are made for, and why. Raises ConfigError if none can be.

    "native" is what the compiler makes of this CPU where it is none of ours.
    """
    isa, features = env.cpu_isa(), cpu_features()
    level = next((name for name, v in variants.allowed(isa).items() if v.runs_on(features)), "native")
    if not isa:
        return level, "the best of this CPU"
    if not variants.VARIANTS[isa].runs_on(features):
        raise ConfigError(f"OCTAVO_CPU_ISA is {isa}, which this CPU does not have; {level} is its best.")
    return level, "OCTAVO_CPU_ISA asks for no more"


def _marches() -> list[tuple[str, ...]]:
    """Return the options to try, one after the other."""
    if isa := env.cpu_isa():
        return [variants.VARIANTS[isa].options]
    fitting = [v.options for v in variants.VARIANTS.values() if v.runs_on(cpu_features())]
    return [(f"-march={march}",) for march in _MARCHES] or fitting


def _check(path: Path) -> None:
    state = path.lstat()
    if stat.S_ISLNK(state.st_mode) or not is_trusted(state):
        raise ConfigError(
            f"The CPU kernels are not loaded from {path}: it is a link, belongs to somebody else or can be "
            "written by others. Remove it, make it yours alone (chmod 700), or set OCTAVO_CACHE_DIR."
        )


def _library_in(folder: Path) -> Path | None:
    command = shlex.split(env.compiler())
    try:
        version = _run([*command, "--version"])
    except (OSError, subprocess.SubprocessError) as error:
        return _any_library(folder, error)
    path = folder / f"{_prefix()}-{_digest(version.encode())}.so"
    try:
        if not path.exists():  # nothing is written else: the cache may be part of a read-only image
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with (folder / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not path.exists():
                    _compile(command, path)
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("CPU kernels could not be compiled; slow torch code runs instead. %s", _reason(error))
        return None
    return path


def _shipped_library(folder: Path) -> Path | None:
    """Return the wheel's best library that this CPU can run; it has to prove right here once."""
    features, sources = cpu_features(), _sources()
    for name, variant in variants.allowed(env.cpu_isa()).items():
        path = variants.library(variants.FOLDER, name, sources)
        if not path.exists() or not variant.runs_on(features):
            continue
        proved = folder / f"{path.stem}-{_digest(features.encode())}.proved"
        if proved.exists():
            return path
        try:
            _run([sys.executable, "-P", "-m", _PROOF, str(path)])
        except (OSError, subprocess.SubprocessError) as error:
            logger.warning("CPU kernels for %s are wrong on this machine. %s", name, _reason(error))
            continue
        with suppress(OSError):  # a cache that cannot be written: it proves right at every start
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            proved.touch()
        return path
    return None


def make_variants(folder: Path, system: str = "linux", machine: str = "") -> list[Path]:
    """Compile a library of each variant into a folder, for a wheel. Raises OSError, SubprocessError.

    system, machine: what the compiler makes them for; "" is this machine
    """
    command = [*shlex.split(env.compiler()), *_OPTIONS, *_LINKING[system]]
    made = []
    for name, variant in (variants.OF_MACHINE[machine] if machine else variants.VARIANTS).items():
        made.append(variants.library(folder, name, _sources()))
        with tempfile.TemporaryDirectory() as work:
            _make([*command, *variant.options], Path(work, "library.so"))
            shutil.copyfile(Path(work, "library.so"), made[-1])
    return made


def _any_library(folder: Path, error: Exception) -> Path | None:
    """Return, without a compiler, a library that any compiler made of these sources for this CPU."""
    found = sorted(folder.glob(f"{_prefix()}-*.so"))
    if found:
        return found[0]
    logger.warning(
        "There are no CPU kernels: models run hundreds of times slower, the smallest at 0.1 tokens/s. "
        "Install a C++ compiler (%s was not found; on Debian and Ubuntu: apt-get install g++), set CXX, or "
        "install octavo's wheel for this machine, which brings the kernels. (%s)",
        env.compiler(),
        _reason(error),
    )
    return None


def _compile(command: list[str], path: Path) -> None:
    """Make the library and let it appear under its name at once, when it has proved right on this machine."""
    logger.info("Compiling CPU kernels into %s", path)
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        made = Path(work, "library.so")
        for march in _marches():
            _make([*command, *_OPTIONS, *march], made)
            try:
                _run([sys.executable, "-P", "-m", _PROOF, str(made)])
            except subprocess.CalledProcessError as error:
                logger.warning(
                    "CPU kernels for %s are wrong on this machine. %s", shlex.join(march), _reason(error)
                )
                failure = error
            else:
                made.chmod(0o700)
                made.replace(path)
                return
        raise failure


def _make(command: list[str], path: Path) -> None:
    sources = sorted(_SOURCES.glob("*.cpp"))
    objects = [f"{path.parent}/{source.stem}.o" for source in sources]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda s, o: _run([*command, "-c", str(s), "-o", o]), sources, objects))
    _run([*command, "-shared", *objects, "-o", str(path)])


def _run(command: list[str]) -> str:
    environment = env.for_child({"PYTHONPATH": os.pathsep.join(sys.path)}, {})
    finished = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S, env=environment
    )
    return finished.stdout


def _prefix() -> str:
    """Return the digest of what the library is made of and of the CPU it is made for."""
    return _digest(_sources().encode(), repr(_marches()).encode(), cpu_features().encode())


def _sources() -> str:
    """Return the digest of what every library is made of."""
    files = sorted(f for f in _SOURCES.iterdir() if f.suffix in {".h", ".cpp"})
    content = b"".join(f.name.encode() + f.read_bytes() for f in files)
    return _digest(content, shlex.join(_OPTIONS).encode())


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _reason(error: Exception) -> str:
    """Return the error, with the beginning of the compiler's own words."""
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
