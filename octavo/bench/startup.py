"""`bench startup`: seconds from nothing to an engine that takes requests, each in a process of its own.

Cold starts have an empty cache folder, so that kernels are compiled; warm ones find what the last left. A
start is this module run as a program: it takes the engine's options as JSON and prints its seconds.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from octavo.base import env
from octavo.base.errors import OctavoError
from octavo.bench.offline import percentiles
from octavo.config.args import EngineArgs
from octavo.config.option import option
from octavo.llm import LLM

_CACHE = "OCTAVO_CACHE_DIR"


@dataclass(frozen=True, kw_only=True)
class StartupOptions:
    """How often."""

    num_iters_cold: int = option(3, "Starts with an empty cache folder.")
    num_iters_warmup: int = option(1, "Starts before the warm ones.")
    num_iters_warm: int = option(3, "Starts with what earlier ones have left.")


Start = Callable[[Mapping[str, Any], Mapping[str, str]], float]


def start_once(engine: Mapping[str, Any], environment: Mapping[str, str]) -> float:
    """Start an engine in another process and end it; its seconds. Raises OctavoError with its last words.

    engine: options
    environment: variables besides this process's own
    """
    command = [sys.executable, "-m", "octavo.bench.startup", json.dumps(engine)]
    variables = env.for_child(environment, {})
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        words = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise OctavoError(f"The engine did not start: {words[-1]}")
    return float(done.stdout.strip().splitlines()[-1])


def measure_startup(
    engine: Mapping[str, Any], options: StartupOptions, start: Start = start_once
) -> dict[str, Any]:
    """Return mean, percentiles and all seconds of cold and warm starts."""
    result: dict[str, Any] = {}
    for phase, count in (("cold", options.num_iters_cold), ("warm", options.num_iters_warm)):
        is_cold = phase == "cold"
        if count and not is_cold:
            for _ in range(options.num_iters_warmup):
                start(engine, {})
        seconds = []
        for _ in tqdm(range(count), desc=f"{phase.capitalize()} startup iterations"):
            with tempfile.TemporaryDirectory() if is_cold else nullcontext() as folder:
                seconds.append(start(engine, {_CACHE: folder} if folder else {}))
        if seconds:
            result |= {
                f"avg_{phase}_startup_time": float(np.mean(seconds)),
                f"{phase}_startup_times": seconds,
                f"{phase}_startup_percentiles": percentiles(seconds),
            }
    return result


def main() -> None:
    """Start an engine with the options in the first argument and print the seconds."""
    options = json.loads(sys.argv[1])
    start = time.perf_counter()
    with LLM.from_engine_args(EngineArgs.from_options(options)):
        seconds = time.perf_counter() - start
    sys.stdout.write(f"{seconds}\n")


if __name__ == "__main__":
    main()
