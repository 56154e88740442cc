"""Other engines beside octavo on one CPU: the same work in turn, round by round, medians and ratios.

    python benchmarks/record.py cpu-peers python benchmarks/peers_cpu.py --scripts FOLDER [--rounds 3]
        [--repeats 1] [--minutes 20] [--work W1,W2,W3,W4,W5,S1,S4,S16,S64] [--once vLLM]
        octavo='python bench_offline.py --model FILE …' vLLM='…' …

Each engine is a name and the command that measures it: what runs Python, a script of FOLDER and its options
(`env A=B python …` sets variables); `streamed.py` lies here, and measures a server. A script imports
`make(name, vocab, seed, n_w1)` from FOLDER's module `workloads`, takes `--workloads` and `--repeat`, and
prints a JSON line per workload: W1 64 mixed requests, W2 one stream, W3 a prompt of 2048, W4 a shared prefix,
W5 16 streams. Sn is added here: n streams of 64 tokens in, 32 out, for a curve of throughput over streams.

An engine called NAME@W2,W5 does these workloads only; a name may come twice, with other ones.

A process does its workloads `--repeats` times, with other prompts each time: the first long prompt also pays
for memory that was never used.

Every row: engine, workload, what is measured, its median and all values, and the ratio to the first engine's
(above 1 = better than that). `first_token_s` counts from the start of the process. An engine that fails is
told and left, and what it had printed counts. Where a script takes `--dump`, a row says for how many requests
the first 8 tokens are those of the first engine: equal work is equal only if it says the same.
"""

import argparse
import json
import random
import runpy
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).resolve()
MEASURES = {"W2": "ms_per_token", "W3": "prefill_tok_s"}
STREAM = 32
Values = dict[tuple[str, str, str], list[float]]
Outputs = dict[str, list[list[int]]]


def main() -> int:
    if sys.argv[1:2] == ["inside"]:
        inside(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scripts", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=1, help="of all workloads, in one process")
    parser.add_argument("--minutes", type=float, default=60, help="no engine is started after so many")
    parser.add_argument("--once", action="append", default=[], help="an engine for the first round only")
    parser.add_argument("--work", default="W1,W2,W3,W4,W5")
    parser.add_argument("engines", nargs="+", metavar="NAME=COMMAND")
    args = parser.parse_args()
    engines = dict(engine.split("=", 1) for engine in args.engines)
    turns = [(n, key) for n in range(args.rounds) for key in engines if n == 0 or key not in args.once]
    end = time.monotonic() + 60 * args.minutes
    values: Values = defaultdict(list)
    outputs: dict[str, Outputs] = {}
    for number, key in turns:
        if time.monotonic() < end:
            print(f"round {number + 1} of {args.rounds}: {key}", file=sys.stderr, flush=True)
            name, _, work = key.partition("@")
            outputs[name] = measure(name, engines[key], args.scripts, work or args.work, args.repeats, values)
    first = next(iter(engines)).partition("@")[0]
    for row in [*rows(values, first), *agreements(outputs, first)]:
        print(json.dumps(row), flush=True)
    return 0


def measure(name: str, command: str, scripts: Path, work: str, repeats: int, values: Values) -> Outputs:
    """Run an engine over all workloads; what it wrote at last, if its script tells."""
    words = shlex.split(command)
    place = next(i for i, word in enumerate(words) if word.endswith(".py"))
    folder = scripts if (scripts / words[place]).exists() else HERE.parent
    script = folder / words[place]
    words[place : place + 1] = [str(HERE), "inside", str(scripts), str(script)]
    words += ["--workloads", work, "--repeat", str(repeats)]
    with tempfile.NamedTemporaryFile("r") as dump:
        if "--dump" in script.read_text(encoding="utf-8"):
            words += ["--dump", dump.name]
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
        written = dump.read()
    if done.returncode:
        print(f"{name} ended with {done.returncode}", file=sys.stderr, flush=True)
    printed = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for row in printed:
        measured = MEASURES.get(row["workload"], "out_tok_s")
        values[name, row["workload"], measured].append(row[measured])
    if printed and "first_token_s" in printed[0]:
        values[name, "start", "first_token_s"].append(printed[0]["first_token_s"])
    return json.loads(written) if written else {}


def rows(values: Values, first: str) -> list[dict[str, object]]:
    """Medians, by workload and then by engine."""
    medians = {key: statistics.median(found) for key, found in values.items()}
    made = []
    for (name, work, measured), found in sorted(values.items(), key=lambda item: item[0][1]):
        row = {"engine": name, "workload": work, "measured": measured}
        median = medians[name, work, measured]
        if base := medians.get((first, work, measured)):
            ratio = median / base if measured.endswith("tok_s") else base / median
            row |= {"ratio": round(ratio, 3)}
        made.append(row | {"median": round(median, 3), "values": found})
    return made


def agreements(outputs: dict[str, Outputs], first: str) -> list[dict[str, object]]:
    """Of each engine that told what it wrote: requests that begin as with the first one."""
    made = []
    for name, written in outputs.items():
        pairs = [
            pair
            for work in written.keys() & outputs[first].keys()
            for pair in zip(written[work], outputs[first][work], strict=True)
        ]
        if pairs and name != first:
            same = sum(a[:8] == b[:8] for a, b in pairs)
            made.append({"engine": name, "requests": len(pairs), "same_first_8_tokens": same})
    return made


def inside(scripts: Path, script: Path, arguments: list[str]) -> None:
    """Be `script`, whose workloads, those of the folder `scripts`, know Sn as well."""
    sys.path.insert(0, str(scripts))
    import workloads

    make = workloads.make

    def make_more(name: str, vocab: int, seed: int = 0, n_w1: int = 64) -> list[tuple[list[int], int]]:
        if not name.startswith("S"):
            return make(name, vocab, seed, n_w1)
        draw = random.Random(f"{seed}-{name}").randrange
        return [([draw(10, vocab) for _ in range(64)], STREAM) for _ in range(int(name[1:]))]

    workloads.make = make_more
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    sys.exit(main())
