"""The online rows of the GPU table: `octavo serve` with random weights, and a client that counts.

python benchmarks/record.py gpu-online python -m benchmarks.online --client bench_online.py [--models …]

The client is a script that takes --url, --model, --in-len, --out-len and --load KIND:VALUE:REQUESTS, and
prints a line "RESULT {json}" per load. Requests carry 256 random ids and want 128 tokens, greedy, streamed.
The first load of each kind warms the server up: sizes of steps that it meets for the first time are recorded
then. A JSON line per load, with the cores that the server kept busy, beside vLLM 0.26's figures on one H200.
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

import psutil
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel

from benchmarks.gpu import CONFIGS

PORT = 8765
URL = f"http://127.0.0.1:{PORT}"
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


def measure(client: str, model: str, loads: list[str], process: psutil.Process) -> Iterator[dict[str, Any]]:
    command = [sys.executable, "-u", client, "--url", URL, "--model", model]
    for load in loads:
        command += ["--load", load]
    before = cpu_seconds(process)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            if line.startswith("RESULT "):
                row = json.loads(line.removeprefix("RESULT "))
                used, before = cpu_seconds(process) - before, cpu_seconds(process)
                cores = {kind: round(seconds / row["wall_s"], 2) for kind, seconds in used.items()}
                yield row | {"busy_cores": cores}
    if running.returncode:
        raise SystemExit(f"The client ended with exit code {running.returncode}.")


def cpu_seconds(process: psutil.Process) -> Counter[str]:
    """Used so far, by what a process of the server does: fronts, and the core with what it started."""
    seconds = Counter(front=sum(process.cpu_times()[:2]))
    for child in process.children(recursive=True):
        kind = "front" if "octavo.serving.process.extra_process" in child.cmdline() else "core"
        seconds[kind] += sum(child.cpu_times()[:2])
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--client", required=True)
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
                for row in measure(args.client, folder, args.loads.split(","), process):
                    if row["failed"]:
                        raise SystemExit(f"{row['failed']} requests failed: {row['first_error']}")
                    warm_up = {} if row["workload"] in kinds else {"warm_up": True}
                    kinds.add(row["workload"])
                    found = {"row": row["workload"], **row, "model": name, **warm_up}
                    vllm = VLLM.get((name, row["workload"]), {})
                    print(json.dumps(found | {"vllm": vllm}), flush=True)


if __name__ == "__main__":
    main()
