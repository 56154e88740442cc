"""What running models on a GPU costs: starts from snapshots, models that change places, new weights.

    python benchmarks/record.py gpu-running python -m benchmarks.gpu_running [--rows start,sleep,swap,updates]

start: Qwen3-0.6B's shape from a checkpoint and from a snapshot, from the start of the process to an engine
that is ready and to its first token; `again` has its kernels compiled. sleep: Llama-3.1-8B's shape with dummy
weights in one engine. swap: two such models in one server, asked in turn for one token; the time of a request
that finds the other model awake. updates: other weights for the 0.6B in a running server, from a trainer's
memory on the same card (IPC) and from files. Tokens are checked in the same run.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from safetensors.torch import load_file, save_file

from benchmarks.gpu import CONFIGS
from benchmarks.gpu_features import write_model
from octavo import LLM, SamplingParams, WeightSender
from octavo.names.helpers import get_open_port

_PROMPT = list(range(100, 164))
_START = """
import sys, time
from octavo import LLM, SamplingParams
llm = LLM(sys.argv[1], skip_tokenizer_init=True)
ready = time.time()
params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
llm.generate({"prompt_token_ids": list(range(100, 164))}, params, use_tqdm=False)
print(ready, time.time())
"""
_MODELS = """
defaults: {load_format: dummy, skip_tokenizer_init: true, max_model_len: 8192}
models: {one: {model: PATH}, other: {model: PATH, seed: 1}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="start,sleep,swap,updates")
    args = parser.parse_args()
    rows = {"start": start, "sleep": sleep, "swap": swap, "updates": updates}
    with tempfile.TemporaryDirectory() as folder:
        small, large, empty = (Path(folder, name) for name in ("small", "large", "empty"))
        for path in (small, large, empty):
            path.mkdir()
        write_model(small, empty)
        (large / "config.json").write_text(json.dumps(CONFIGS["llama-3.1-8b"]))
        for row in args.rows.split(","):
            rows[row](large if row in ("sleep", "swap") else small)


def tell(row: str, **figures: Any) -> None:
    rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in figures.items()}
    print(json.dumps({"row": row, **rounded}), flush=True)


def start(model: Path) -> None:
    """Time starts from files, then from a snapshot of them."""
    snapshot = model.with_name("snapshot")
    for name, path in (("files", model), ("files again", model), ("snapshot", snapshot), ("again", snapshot)):
        if path is snapshot and not path.exists():
            words = ["snapshot", str(model), str(path), "--skip-tokenizer-init"]
            began_s = time.time()
            subprocess.run([sys.executable, "-m", "octavo", *words], check=True, stdout=sys.stderr)
            size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            tell("snapshot made", seconds=time.time() - began_s, gib=size / 2**30)
        began_s = time.time()
        told = subprocess.run([sys.executable, "-c", _START, str(path)], check=True, capture_output=True)
        ready_s, first_s = map(float, told.stdout.split()[-2:])
        tell(f"start {name}", ready_s=ready_s - began_s, first_token_s=first_s - began_s)


def sleep(model: Path) -> None:
    """Time level 1 in one engine, in turn."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    found: dict[str, list[float]] = {"sleep_s": [], "wake_s": [], "first_token_s": []}
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 8192}
    with LLM(str(model), **options) as llm:
        ask = lambda: llm.generate({"prompt_token_ids": _PROMPT}, params, use_tqdm=False)  # noqa: E731
        expected = ask()[0].outputs[0].token_ids
        for _ in range(4):
            for name, work in (("sleep_s", llm.sleep), ("wake_s", llm.wake_up), ("first_token_s", ask)):
                began_s = time.perf_counter()
                work()
                found[name].append(time.perf_counter() - began_s)
        assert ask()[0].outputs[0].token_ids == expected
    first = found["sleep_s"].pop(0)
    later = {name: statistics.median(times) for name, times in found.items()}
    tell("sleep llama-3.1-8b", first_sleep_s=first, **later)


def swap(model: Path) -> None:
    """Time requests to two models that take turns in one server."""
    file = model.with_name("models.yaml")
    file.write_text(_MODELS.replace("PATH", str(model)))
    with served("--models", str(file)) as url:
        waits, answers = [], {}
        for number in range(14):
            name = ("one", "other")[number % 2]
            began_s = time.perf_counter()
            text = tokens(url, model=name, max_tokens=1)
            waits.append(time.perf_counter() - began_s)
            assert answers.setdefault(name, text) == text
    tell(
        "swap llama-3.1-8b",
        load_s=waits[:2],
        first_swaps_s=waits[2:4],
        p50_s=statistics.median(waits[4:]),
        max_s=max(waits[4:]),
    )


def updates(model: Path) -> None:
    """Time other weights in a running server; they are the same ones upside down."""
    weights = load_file(model / "model.safetensors", device="cuda")
    turned = {name: tensor.flip(0) for name, tensor in weights.items()}
    size = sum(tensor.nbytes for tensor in weights.values()) / 1e9
    other = model.with_name("other")
    other.mkdir()
    (other / "config.json").write_text((model / "config.json").read_text())
    save_file({k: v.cpu() for k, v in turned.items()}, other / "model.safetensors", metadata={"format": "pt"})
    flags = "--skip-tokenizer-init", "--dev-mode", "--gpu-memory-utilization", "0.5"
    with served(str(model), *flags, "--weight-transfer-config", '{"backend": "ipc"}') as url:
        before, seconds = tokens(url), {}
        sender = WeightSender(url, "ipc", device="cuda:0")
        found = []
        for name, state in (("ipc_s", turned), ("ipc_again_s", weights)):
            began_s = time.perf_counter()
            sender.send(state, name)
            seconds[name] = time.perf_counter() - began_s
            found.append(tokens(url))
        began_s = time.perf_counter()
        body = {"model_path": str(other), "weight_version": "files"}
        httpx.post(f"{url}/update_weights_from_disk", json=body, timeout=120).raise_for_status()
        seconds["files_s"] = time.perf_counter() - began_s
        assert found == [tokens(url), before] and found[0] != before
    tell("updates qwen3-0.6b", gb=size, **seconds)


def tokens(url: str, **options: Any) -> Any:
    body = {
        "prompt": _PROMPT,
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = httpx.post(f"{url}/v1/completions", json=body | options, timeout=240)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


@contextmanager
def served(*words: str) -> Iterator[str]:
    """The address of `octavo serve` while it runs."""
    url = f"http://127.0.0.1:{(port := get_open_port())}"
    command = [sys.executable, "-m", "octavo", "serve", *words, "--port", str(port)]
    process = subprocess.Popen(command, stdout=sys.stderr)
    try:
        while process.poll() is None:
            try:
                if httpx.get(f"{url}/ready").status_code == 200:
                    yield url
                    return
            except httpx.TransportError:
                time.sleep(0.1)
        raise SystemExit(f"The server ended with {process.returncode}.")
    finally:
        process.terminate()
        process.wait(30)


if __name__ == "__main__":
    main()
