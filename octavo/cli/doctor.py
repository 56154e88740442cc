"""Check whether octavo can run here: each check says what it found and, when it is wrong, what to do.

With --url, watch a running server for some seconds and say what holds it back: waiting requests, the KV
cache, memory bandwidth, arithmetic, or the host, with the figures.
"""

import argparse
import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple
from urllib.parse import urlsplit

from octavo.base import env, hub
from octavo.base.errors import ConfigError
from octavo.cli import machine
from octavo.config.model import DEFAULT_MODEL

_LITTLE_MEMORY_BYTES = 2 << 30
_BUILD = "from octavo.runtime.kernels.build import shared_library as build; print(build() or '')"
"""Run in a process of its own: the command line imports nothing of the runtime."""
_NO_KERNELS = (
    "install a C++ compiler (on Debian and Ubuntu: apt-get install g++), set CXX, or install octavo's "
    "wheel for Linux on x86-64, which brings them built"
)


class Finding(NamedTuple):
    """What a check found; `advice` is empty when all is well."""

    subject: str
    found: str
    advice: str = ""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "--model", default=DEFAULT_MODEL, help="The model to look for (default: %(default)s)."
    )
    parser.add_argument("--url", metavar="URL", help="Watch this server instead.")
    parser.add_argument(
        "--seconds", type=float, default=5.0, metavar="S", help="How long (default: %(default)s)."
    )


def run(args: argparse.Namespace) -> int:
    """Print the findings; status 1 when one of them needs a hand."""
    if args.url:
        print("\n".join(_watch(args.url, args.seconds)))
        return 0
    sick = False
    for finding in examine(args.model):
        sick = sick or bool(finding.advice)
        print(f"{'!!' if finding.advice else 'ok'}  {finding.subject:<9} {finding.found}")
        if finding.advice:
            print(f"    {'':<9} → {finding.advice}")
    return int(sick)


def _watch(url: str, seconds: float) -> list[str]:
    """What holds a server back. Raises OctavoError when it shows nothing."""
    from octavo.base.cores import usable_cores
    from octavo.bench.backends import BACKENDS  # loads an HTTP client: only with --url
    from octavo.bench.client import Target
    from octavo.bench.diagnosis import diagnose, idle_core_s, watch

    async def look() -> list[str]:
        url_only = url.rstrip("/").removesuffix("/v1")
        key = env.openai_api_key()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with Target(url_only, BACKENDS["openai"], headers=headers) as target:
            idle_s = idle_core_s()
            pages, watched_s = await watch(target, seconds)
            idle_cores = min((idle_core_s() - idle_s) / watched_s, usable_cores())
        if not pages[-1].values:
            raise ConfigError(f"{url} shows no metrics: a key may be missing (OPENAI_API_KEY).")
        is_here = (urlsplit(url).hostname or "") in ("127.0.0.1", "localhost", "::1")
        return diagnose(pages, watched_s, idle_cores if is_here else None).lines()

    return asyncio.run(look())


def examine(model: str) -> Iterator[Finding]:
    """All checks, in the order in which one would mend things."""
    checks: tuple[Callable[[], Finding], ...] = (_packages, _compiler, _kernels, _memory, _gpu)
    for check in checks:
        yield check()
    found = _model(model)
    yield found
    if not found.advice:
        yield _weights(found.found)


def _packages() -> Finding:
    versions = machine.package_versions()
    missing = [name for name, version in versions.items() if version == "missing"]
    found = ", ".join(f"{name} {version}" for name, version in versions.items())
    return Finding("packages", found, f"pip install {' '.join(missing)}" if missing else "")


def _compiler() -> Finding:
    return Finding("compiler", machine.compiler() or f"{env.compiler()} not found")


def _kernels() -> Finding:
    if env.kernels_disabled():
        return Finding("kernels", "switched off", "unset OCTAVO_NO_CPU_KERNELS for full speed")
    done = subprocess.run([sys.executable, "-c", _BUILD], capture_output=True, text=True, check=False)
    if path := done.stdout.strip():
        return Finding("kernels", path)
    if not machine.compiler():
        return Finding("kernels", "none: on a CPU, models run hundreds of times slower", _NO_KERNELS)
    last = (done.stderr.strip() or "no reason given").splitlines()[-1]
    return Finding("kernels", f"not built ({last})", "python -m octavo.runtime.kernels.build shows why")


def _memory() -> Finding:
    total, available = machine.memory_bytes()
    found = f"{machine.in_gib(available)} of {machine.in_gib(total)} available"
    if 0 < available < _LITTLE_MEMORY_BYTES:
        return Finding("memory", found, "close other programs, or lower --gpu-memory-utilization")
    return Finding("memory", found)


def _gpu() -> Finding:
    return Finding("gpu", "; ".join(machine.gpus()) or "none: octavo runs on the CPU")


def _model(model: str) -> Finding:
    try:
        path = hub.installed(model) if model in hub.BUILT_IN else hub.locate(model)
    except ConfigError as error:
        return Finding("model", str(error), "check the name; `octavo pull NAME` brings a model here")
    if path is None:
        return Finding("model", f"{model} is not on this machine", f"octavo pull {model}")
    if model in hub.BUILT_IN and not hub.is_sound(model, path):
        return Finding("model", f"{path} is damaged", f"remove it, then octavo pull {model}")
    return Finding("model", str(path))


def _weights(path: str) -> Finding:
    """Plan the model in a process of its own: what its matrices are stored as, or why it cannot be loaded."""
    command = [sys.executable, "-m", "octavo", "plan", path, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout.strip():
        reason = (done.stderr.strip() or "no reason given").splitlines()[-1]
        return Finding("weights", "cannot be loaded", reason.removeprefix("octavo: error: "))
    plan = json.loads(done.stdout)
    kinds: Counter[str] = Counter()
    for matrix, count in plan["matrices"].items():
        kinds[matrix.partition(" ")[0]] += count
    stored = ", ".join(f"{count} x {kind}" for kind, count in kinds.items()) or plan["dtype"]
    found = f"{machine.in_gib(plan['weight_bytes'])}, {stored}; room for {plan['num_tokens']} tokens"
    return Finding("weights", found, plan["problem"])
