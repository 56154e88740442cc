"""The online rows of the GPU table: `octavo serve` with random weights, and `octavo bench serve` as the
client.

python benchmarks/record.py gpu-online python -m benchmarks.online [--models …] [--clients 4]

Requests carry 256 random ids and want 128 tokens, greedy, streamed; several clients share each load, so that
none of them is the bottleneck. The first load of each kind warms the server up: sizes of steps that it meets
for the first time are recorded then. A JSON line per load, with the cores that the server kept busy, beside
vLLM 0.26's figures on one H200.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel

from benchmarks.gpu import CONFIGS

PORT = 8765
URL = f"http://127.0.0.1:{PORT}"
INPUT_LEN, OUTPUT_LEN, BLOCK = 256, 128, 16
REQUEST = {"timestamp": 0, "input_length": INPUT_LEN, "output_length": OUTPUT_LEN}
LOADS = "conc:256:256,rate:32:128,rate:32:256,conc:256:1024"
VLLM: dict[tuple[str, str], dict[str, float]] = {
    ("llama-3.1-8b", "online_rate_32"): {"ttft_ms_p50": 22.2, "itl_ms_p99": 11.6},
    ("llama-3.1-8b", "online_conc_256"): {"out_tok_s": 11051, "ttft_ms_p50": 928},
    ("qwen3-0.6b", "online_rate_32"): {"ttft_ms_p50": 9.8, "itl_ms_p50": 1.6},
    ("qwen3-0.6b", "online_conc_256"): {"out_tok_s": 30548},
}


@contextmanager
def server(folder: Path, options: list[str]) -> Iterator[tuple[psutil.Process, float]]:
    """Runs meanwhile; gives it, and the seconds from its start until it was healthy."""
    command = [sys.executable, "-m", "octavo", "serve", str(folder), "--port", str(PORT)]
    command += ["--host", "127.0.0.1", "--load-format", "dummy", *options]
    began = time.perf_counter()
    with Path(folder, "server.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_for(process, Path(folder, "server.log"))
        yield psutil.Process(process.pid), time.perf_counter() - began
    finally:
        process.terminate()
        process.wait(60)


def make_model(folder: Path, config: dict[str, Any]) -> None:
    """A config and a tokenizer of as many made-up words: weights are drawn when they are loaded."""
    Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
    words = {f"w{number} ": number for number in range(config["vocab_size"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0 "))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    Path(folder, "tokenizer_config.json").write_text(json.dumps(kind), encoding="utf-8")


def wait_for(process: subprocess.Popen[bytes], log: Path) -> None:
    while True:
        try:
            urllib.request.urlopen(f"{URL}/health", timeout=1).close()
        except OSError:
            if process.poll() is not None:
                raise SystemExit(log.read_text(encoding="utf-8")[-4000:]) from None
            time.sleep(0.1)
        else:
            return


def measure(folder: Path, load: str, num_clients: int) -> dict[str, Any]:
    """One load, KIND:VALUE:REQUESTS, from several clients at once; the figures of all together."""
    kind, value, total = load.split(":")
    count, share = int(total) // num_clients, float(value) / num_clients
    pace = ["--request-rate", str(share)] if kind == "rate" else ["--max-concurrency", str(int(share))]
    clients = []
    for number in range(num_clients):
        trace = folder / f"trace{number}.jsonl"
        blocks = range(INPUT_LEN // BLOCK)
        lines = [{**REQUEST, "hash_ids": [f"{load} {number} {n} {b}" for b in blocks]} for n in range(count)]
        trace.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
        command = [sys.executable, "-m", "octavo", "bench", "serve", "--base-url", URL, "--disable-tqdm"]
        command += ["--dataset-name", "timed_trace", "--dataset-path", str(trace), "--no-self-timed"]
        command += ["--skip-tokenizer-init", "--temperature", "0", *pace, "--num-prompts", str(count)]
        command += ["--save-result", "--save-detailed", "--result-filename", str(trace.with_suffix(".json"))]
        clients.append((subprocess.Popen(command, stdout=subprocess.DEVNULL), trace.with_suffix(".json")))
    codes = [client.wait() for client, _ in clients]
    if any(codes):
        raise SystemExit(f"A client of {load} failed.")
    results = [json.loads(path.read_text(encoding="utf-8")) for _, path in clients]
    return {"row": f"online_{'conc' if kind == 'conc' else 'rate'}_{value}", **figures(results)}


def figures(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Of clients that ran at once, as if they were one."""
    wall_s = max(result["duration"] for result in results)
    tokens = sum(result["total_output_tokens"] for result in results)
    values = {name: [v for r in results for v in r[f"{name}s"]] for name in ("ttft", "itl")}
    values["itl"] = [gap for gaps in values["itl"] for gap in gaps]
    row = {"n": sum(r["completed"] for r in results), "wall_s": wall_s, "out_tok_s": tokens / wall_s}
    for name, seconds in values.items():
        row |= {f"{name}_ms_p{p}": 1000 * float(np.percentile(seconds, p)) for p in (50, 99)}
    return {name: round(value, 3) for name, value in row.items()}


def cpu_seconds(process: psutil.Process) -> Counter[str]:
    """Used so far, by what a process of the server does: fronts, and the core with what it started."""
    seconds = Counter(front=sum(process.cpu_times()[:2]))
    for child in process.children(recursive=True):
        kind = "front" if "octavo.serving.process.extra_process" in child.cmdline() else "core"
        seconds[kind] += sum(child.cpu_times()[:2])
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=4, help="client processes")
    parser.add_argument("--models", default=",".join(CONFIGS))
    parser.add_argument("--loads", default=LOADS, help="in this order")
    parser.add_argument("--options", default="--dtype bfloat16 --max-model-len 4096", help="for the server")
    args = parser.parse_args()
    for name in args.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            make_model(Path(folder), CONFIGS[name])
            with server(Path(folder), args.options.split()) as (process, start_s):
                print(json.dumps({"row": "server start", "model": name, "start_s": round(start_s, 2)}))
                kinds = set()
                for load in args.loads.split(","):
                    before = cpu_seconds(process)
                    row = {**measure(Path(folder), load, args.clients), "model": name}
                    used = cpu_seconds(process) - before
                    row["busy_cores"] = {kind: round(s / row["wall_s"], 2) for kind, s in used.items()}
                    warm_up = {} if row["row"] in kinds else {"warm_up": True}
                    kinds.add(row["row"])
                    print(
                        json.dumps({**row, **warm_up, "vllm": VLLM.get((name, row["row"]), {})}), flush=True
                    )


if __name__ == "__main__":
    main()
