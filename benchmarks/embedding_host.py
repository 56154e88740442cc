"""What a text costs the processes of an embedding server beside the model: of checkouts, in turn.

    python benchmarks/record.py embedding-host python -m benchmarks.embedding_host [CHECKOUT ...]

A BERT of one layer, 16 wide, and texts of 50 tokens, so that hardly anything is computed: offline, and over
HTTP with one API process, 256 texts a request, bytes. Prints a JSON line for each checkout: medians of the
rounds, in microseconds per text; over HTTP also the CPU time of either process.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import gpu_embeddings as shared

SHAPE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 16}
OPTIONS = shared.OPTIONS | {"dtype": "float32"}
COUNT, LENGTH = 8192, 50


def write(folder: Path) -> None:
    from octavo.base.hub import installed

    shared.SHAPE = SHAPE
    folder.mkdir()
    shared.write(folder, Path(installed("minilm")))
    pooling = {"word_embedding_dimension": SHAPE["hidden_size"], "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def offline(folder: Path, texts: list[str]) -> dict[str, float]:
    from octavo import LLM

    with LLM(str(folder), **OPTIONS) as llm:
        llm.embed(texts[:512], use_tqdm=False)
        took = shared.best(lambda: llm.embed(texts, use_tqdm=False), 3)
    return {"offline_us": took / COUNT * 1e6}


def cpu_seconds(port: int) -> dict[str, float]:
    """CPU time so far of the server at this port and of its engine core."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_text().split("\0")
            parent, *_ = fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()[1:]
        except OSError:
            continue
        seconds = (int(fields[10]) + int(fields[11])) / os.sysconf("SC_CLK_TCK")
        if "serve" in words and str(port) in words:
            found["api"], server = seconds, entry.name
        elif "octavo.engine.process" in words:
            found[f"core of {parent}"] = seconds
    return {"api": found["api"], "core": found[f"core of {server}"]}


def over_http(folder: Path, texts: list[str]) -> dict[str, float]:
    shared.OPTIONS = OPTIONS
    with shared.serving(folder, 1) as port:
        shared.over_http([port], texts[:1024])
        before, began = cpu_seconds(port), time.perf_counter()
        for _ in range(3):
            shared.over_http([port], texts)
        took, after = time.perf_counter() - began, cpu_seconds(port)
    per_text = 1e6 / (3 * COUNT)
    return {"http_us": took * per_text} | {
        f"http_{name}_cpu_us": (after[name] - before[name]) * per_text for name in after
    }


def run_in(checkout: str, model: Path, kind: str) -> dict[str, float]:
    command = [sys.executable, str(Path(__file__).resolve()), str(model), "--one", kind]
    paths = os.pathsep.join((str(Path(checkout).resolve()), str(Path(__file__).resolve().parents[1])))
    variables = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(command, cwd=checkout, env=variables, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkouts", nargs="*", default=["."])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", choices=("offline", "http"), help="run it once; of the model `checkouts`")
    args = parser.parse_args()
    texts = shared.texts_of(LENGTH, COUNT)
    if args.one:
        run = {"offline": offline, "http": over_http}[args.one]
        print(json.dumps(run(Path(args.checkouts[0]), texts)))
        return
    rows: dict[str, dict[str, list[float]]] = {checkout: {} for checkout in args.checkouts}
    with tempfile.TemporaryDirectory() as place:
        write(Path(place, "model"))
        for _ in range(args.rounds):
            for checkout, row in rows.items():
                for kind in ("offline", "http"):
                    for name, value in run_in(checkout, Path(place, "model"), kind).items():
                        row.setdefault(name, []).append(value)
    for checkout, row in rows.items():
        medians = {name: round(statistics.median(values), 1) for name, values in row.items()}
        print(json.dumps({"checkout": checkout, **medians}), flush=True)


if __name__ == "__main__":
    main()
