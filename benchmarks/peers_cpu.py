"""Other engines beside octavo on one CPU: the same work in turn, round by round, medians and ratios.

    python benchmarks/record.py cpu-peers python benchmarks/peers_cpu.py --scripts FOLDER [--rounds 3]
        [--work W1,W2,W3,W4,W5,S1,S4,S16,S64] octavo='python bench_offline.py --model FILE …' NAME='…' …

Each engine is a name and the command that measures it: what runs Python, a script of FOLDER and its options
(`env A=B python …` sets variables). A script there imports `make(name, vocab, seed, n_w1)` from the module
`workloads` beside it, takes `--workloads` and `--repeat`, and prints a JSON line per workload: W1 64 mixed
requests, W2 one stream, W3 a prompt of 2048, W4 a shared prefix, W5 16 streams. Sn is added here: n streams
of 64 tokens in, 128 out, for a curve of throughput over streams.

Every row: engine, workload, what is measured, its median and all values, and the ratio to the first engine's
(above 1 = better than that). `first_token` is the time from the start of the process.
"""

import argparse
import json
import random
import runpy
import shlex
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

HERE = str(Path(__file__).resolve())
MEASURES = {"W2": "ms_per_token", "W3": "prefill_tok_s"}
Values = dict[tuple[str, str, str], list[float]]


def main() -> int:
    if sys.argv[1:2] == ["inside"]:
        inside(Path(sys.argv[2]), sys.argv[3:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scripts", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", default="W1,W2,W3,W4,W5")
    parser.add_argument("engines", nargs="+", metavar="NAME=COMMAND")
    args = parser.parse_args()
    engines = dict(engine.split("=", 1) for engine in args.engines)
    values: Values = defaultdict(list)
    for number in range(args.rounds):
        for name, command in engines.items():
            print(f"round {number + 1} of {args.rounds}: {name}", file=sys.stderr, flush=True)
            measure(name, command, args.scripts, args.work, values)
    for row in rows(values, next(iter(engines))):
        print(json.dumps(row), flush=True)
    return 0


def measure(name: str, command: str, scripts: Path, work: str, values: Values) -> None:
    """Run an engine once over all workloads."""
    words = shlex.split(command)
    place = next(i for i, word in enumerate(words) if word.endswith(".py"))
    script = str(scripts / Path(words[place]).name)
    words[place : place + 1] = [HERE, "inside", script]
    done = subprocess.run(
        [*words, "--workloads", work, "--repeat", "1"], stdout=subprocess.PIPE, text=True, check=True
    )
    printed = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for row in printed:
        measured = MEASURES.get(row["workload"], "out_tok_s")
        values[name, row["workload"], measured].append(row[measured])
    values[name, "start", "first_token_s"].append(printed[0]["first_token_s"])


def rows(values: Values, first: str) -> list[dict[str, object]]:
    """Medians, by workload and then by engine."""
    medians = {key: statistics.median(found) for key, found in values.items()}
    made = []
    for (name, work, measured), found in sorted(values.items(), key=lambda item: item[0][1]):
        median, base = medians[name, work, measured], medians[first, work, measured]
        better = median / base if measured.endswith("tok_s") else base / median
        numbers = {"median": median, "values": found, f"ratio_to_{first}": round(better, 3)}
        made.append({"engine": name, "workload": work, "measured": measured} | numbers)
    return made


def inside(script: Path, arguments: list[str]) -> None:
    """Be `script`, whose workloads know Sn as well."""
    sys.path.insert(0, str(script.parent))
    import workloads

    make = workloads.make

    def make_more(name: str, vocab: int, seed: int = 0, n_w1: int = 64) -> list[tuple[list[int], int]]:
        if not name.startswith("S"):
            return make(name, vocab, seed, n_w1)
        draw = random.Random(f"{seed}-{name}").randrange
        return [([draw(10, vocab) for _ in range(64)], 128) for _ in range(int(name[1:]))]

    workloads.make = make_more
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    sys.exit(main())
