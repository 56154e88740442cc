"""Run a benchmark that prints JSON lines, and keep its figures with what they depend on.

python benchmarks/record.py [--note TEXT] NAME COMMAND …

Writes benchmarks/results/NAME.json: date, machine, its load before, versions, commit, command, note, every
JSON line printed.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "msgspec", "triton")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("--note", default="")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    load = os.getloadavg()[0]
    done = subprocess.run(args.command, stdout=subprocess.PIPE, text=True, check=False)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not rows:
        print(f"The command ended with {done.returncode} and {len(rows)} rows: nothing is recorded.")
        return 1
    record = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "load_before": round(load, 2),
        "versions": {"python": platform.python_version(), **versions()},
        "commit": git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain") else ""),
        "command": [Path(word).name if "/" in word else word for word in args.command],
        "note": args.note,
        "rows": rows,
    }
    path = ROOT / "benchmarks" / "results" / f"{args.name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        print(json.dumps(row))
    return 0


def machine() -> dict[str, object]:
    """Processor, its wide instructions, cores, memory, GPU."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    fields = dict(line.split(":", 1) for line in info.split("\n\n", 1)[0].splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in fields.items()}
    wide = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
    memory = Path("/proc/meminfo").read_text(encoding="ascii").split()
    return {
        "cpu": fields.get("model name", platform.machine()),
        "features": [name for name in wide if name in fields.get("flags", "").split()],
        "cores": info.count("processor\t"),
        "memory_gib": round(int(memory[1]) / 2**20, 1),
        "gpu": gpu(),
    }


def gpu() -> str:
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def git(*words: str) -> str:
    return subprocess.run(
        ["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False
    ).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
