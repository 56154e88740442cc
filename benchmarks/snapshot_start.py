"""What a start takes on a CPU, from files and from a snapshot, beside what `import torch` alone takes.

    python benchmarks/record.py snapshot-start python -m benchmarks.snapshot_start [--before FOLDER]

In turn, from the start of the process: `import torch` and one tensor; `octavo generate` with the default
model's files, and with a snapshot of them, to its first token; a script that makes an LLM, to the same; a
server until it is ready. With --before (another checkout of octavo) those of files are taken there, too.
cpu_s is of the whole process. Python's bytecode is written before, as an installation does.
"""

import argparse
import compileall
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import octavo
from octavo.base.link import free_port

_ROUNDS = 8
_TORCH = ["-c", "import torch; torch.empty(1); print(1)"]
_GENERATE = ["-m", "octavo", "generate", "What is the capital of France?", "--max-tokens", "1", "--model"]
_SCRIPT = """
from octavo import LLM, SamplingParams
params = SamplingParams(temperature=0, max_tokens=1)
outputs = LLM("smollm2").generate("The capital of France is", params, use_tqdm=False)
print(outputs[0].outputs[0].text, flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", help="Another checkout, measured beside this one.")
    args = parser.parse_args()
    here = str(Path(octavo.__file__).parents[1])
    trees = {"": here, **({", before": args.before} if args.before else {})}
    for tree in trees.values():
        compileall.compile_dir(f"{tree}/octavo", quiet=1)
    with tempfile.TemporaryDirectory() as folder:
        snapshot = f"{folder}/kept"
        words = [sys.executable, "-m", "octavo", "snapshot", "smollm2", snapshot]
        subprocess.run(words, check=True, stdout=sys.stderr)
        commands = {"import torch": (_TORCH, here), "first token, snapshot": ([*_GENERATE, snapshot], here)}
        for name, tree in trees.items():
            commands[f"first token, files{name}"] = [*_GENERATE, "smollm2"], tree
            commands[f"first token, script{name}"] = ["-c", _SCRIPT], tree
        found: dict[str, list[tuple[float, float]]] = {}
        for _ in range(_ROUNDS):
            for name, (words, tree) in commands.items():
                found.setdefault(name, []).append(timed(words, tree))
            for name, tree in trees.items():
                found.setdefault(f"server ready{name}", []).append(served(tree))
    for name, times in found.items():
        walls, cpus = zip(*times[1:], strict=True)  # the first reads files
        figures = {
            "wall_s": statistics.median(walls),
            "least_s": min(walls),
            "cpu_s": statistics.median(cpus),
        }
        print(json.dumps({"row": name, **{k: round(v, 3) for k, v in figures.items()}}), flush=True)


def start(words: list[str], tree: str) -> "subprocess.Popen[bytes]":
    """Start Python with a tree's octavo."""
    command = [sys.executable, "-P", *words]
    environment = os.environ | {"PYTHONPATH": tree}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)


def ended(process: "subprocess.Popen[bytes]") -> float:
    """Seconds that a process and its children have computed, once it has ended."""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime


def served(tree: str) -> tuple[float, float]:
    """Seconds until a server is ready, and those that it and its core compute until they have ended."""
    began_s, port = time.perf_counter(), str(free_port("127.0.0.1"))
    with start(["-m", "octavo", "serve", "smollm2", "--port", port], tree) as process:
        for _ in range(10_000):
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                break
            time.sleep(0.005)
        wall_s = time.perf_counter() - began_s
        process.terminate()
        return wall_s, ended(process)


def timed(words: list[str], tree: str) -> tuple[float, float]:
    """Seconds until a process prints, and those that it computes."""
    began_s = time.perf_counter()
    with start(words, tree) as process:
        assert process.stdout is not None and process.stdout.read(1)
        return time.perf_counter() - began_s, ended(process)


if __name__ == "__main__":
    main()
