"""What a start from a snapshot takes on a CPU, beside what `import torch` alone takes.

    python benchmarks/record.py snapshot-start python -m benchmarks.snapshot_start

In turn, from the start of the process: `import torch` and one tensor; `octavo generate` with the default
model's files, and with a snapshot of them, to its first token. cpu_s is of the whole process. Python's
bytecode is written before, as an installation does.
"""

import compileall
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import octavo

_ROUNDS = 11
_TORCH = ["-c", "import torch; torch.empty(1); print(1)"]
_GENERATE = ["-m", "octavo", "generate", "What is the capital of France?", "--max-tokens", "1", "--model"]


def main() -> None:
    compileall.compile_dir(str(Path(octavo.__file__).parent), quiet=1)
    with tempfile.TemporaryDirectory() as folder:
        snapshot = f"{folder}/kept"
        words = [sys.executable, "-m", "octavo", "snapshot", "smollm2", snapshot]
        subprocess.run(words, check=True, stdout=sys.stderr)
        commands = {
            "import torch": _TORCH,
            "first token, files": [*_GENERATE, "smollm2"],
            "first token, snapshot": [*_GENERATE, snapshot],
        }
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
        for _ in range(_ROUNDS):
            for name, words in commands.items():
                found[name].append(timed(words))
    for name, times in found.items():
        walls, cpus = zip(*times[1:], strict=True)  # the first reads files
        figures = {
            "wall_s": statistics.median(walls),
            "least_s": min(walls),
            "cpu_s": statistics.median(cpus),
        }
        print(json.dumps({"row": name, **{k: round(v, 3) for k, v in figures.items()}}), flush=True)


def timed(words: list[str]) -> tuple[float, float]:
    """Seconds until a process prints, and those that it computes."""
    began_s = time.perf_counter()
    command = [sys.executable, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None and process.stdout.read(1)
        wall_s = time.perf_counter() - began_s
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return wall_s, usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
