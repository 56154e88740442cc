"""What first tries met: Ctrl-C inside `LLM.generate`, and a machine without a C++ compiler.

    python benchmarks/record.py first-use python -m benchmarks.first_use --before FOLDER --wheel WHEEL

Each row has a process of its own, with --before FOLDER (another checkout of octavo) one more.
Without a compiler this octavo is the platform wheel of `make wheel`, its cache empty. Prints one JSON line
per case and tree:

usable           of 16 calls interrupted after 0.15 to 1.1 s, those after which the next gave its own tokens
next s           seconds of that next call of 6 tokens, median and most
first token s    from the start of the process, Python's and torch's imports included
tok/s            of one greedy request after that
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INTERRUPTS = """
import json, signal, statistics, threading, time
from octavo import LLM, SamplingParams
prompts = [f"{number} small birds sat on a wall, and" for number in range(16)]
long = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
short = SamplingParams(temperature=0, max_tokens=6)
make = lambda: LLM("smollm2", max_model_len=1024)
llm = make()
answer = lambda: llm.generate("The sea is", short, use_tqdm=False)[0].outputs[0].token_ids
main, expected, usable, took_s = threading.main_thread().ident, answer(), 0, []
for number in range(16):
    threading.Timer(0.15 + 0.0633 * number, signal.pthread_kill, (main, signal.SIGINT)).start()
    try:
        while True:
            llm.generate(prompts, long, use_tqdm=False)
    except KeyboardInterrupt:
        pass
    began_s = time.perf_counter()
    try:
        usable += answer() == expected
    except Exception:
        llm = make()
        continue
    took_s.append(time.perf_counter() - began_s)
row = {"next s": statistics.median(took_s), "next s, most": max(took_s)} if took_s else {}
print(json.dumps({"usable": usable, **row}))
"""
TOKENS = """
import json, time
from octavo import LLM, SamplingParams
llm = LLM("smollm2", max_model_len=512)
llm.generate("The sea is", SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
print(json.dumps({"at": time.time()}), flush=True)
began_s = time.perf_counter()
params = SamplingParams(temperature=0, max_tokens=NUMBER, ignore_eos=True)
[output] = llm.generate("The capital of France is", params, use_tqdm=False)
took_s = time.perf_counter() - began_s
print(json.dumps({"tok/s": NUMBER / took_s, "text": " ".join(output.outputs[0].text.split()[:6])}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", default="", help="Another checkout, measured beside this one.")
    parser.add_argument("--wheel", required=True, help="The platform wheel of this octavo.")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder, "site")
        with zipfile.ZipFile(args.wheel) as archive:
            archive.extractall(site)
        trees = {"before": (args.before, args.before, 4)} if args.before else {}
        for tree, (here, without, tokens) in {**trees, "now": (str(ROOT), str(site), 128)}.items():
            report("16 interrupts", tree, lines(INTERRUPTS, PYTHONPATH=here)[-1])
            bare = Path(folder, f"{tree}-bin")
            bare.mkdir()
            report("no compiler", tree, without_compiler(without, tokens, str(bare)))


def without_compiler(path: str, tokens: int, empty: str) -> dict[str, object]:
    began = json.loads(run("import json, time; print(json.dumps(time.time()))"))
    environment = {"PYTHONPATH": path, "PATH": empty, "CXX": "", "OCTAVO_CACHE_DIR": f"{empty}/cache"}
    first, rest = lines(TOKENS.replace("NUMBER", str(tokens)), **environment)
    return {"first token s": float(str(first["at"])) - began, **rest}


def report(case: str, tree: str, row: dict[str, object]) -> None:
    print(json.dumps({"case": case, "octavo": tree, **row}), flush=True)


def lines(script: str, **environment: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in run(script, **environment).splitlines() if line.startswith("{")]


def run(script: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-P", "-c", script],
        env=os.environ | environment,
        cwd="/",
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=500,
    )
    return done.stdout


if __name__ == "__main__":
    main()
