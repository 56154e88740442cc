"""What `octavo route` wins and costs: prefixes that fit one cache but not all, and the time it adds.

    python benchmarks/record.py route python -m benchmarks.route [--rows prefixes,added] [--prefix-tokens 256]

prefixes: four servers with the default model, one thread each, on cores of their own where there are ten;
16 prefixes, of which each cache holds six. `octavo bench serve` asks the router for 8 at once, with the
policies in turn, the first time unmeasured. Told are requests per second, the median time to the first
token, and the tokens that the servers had to compute, which other work on the machine hardly changes. added:
the median time of a request to a server, and through a router before it, one at a time and in turn; and the
router's CPU time for each.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from octavo.names.helpers import get_open_port
from tests.served_process import ServeProcess

_NUM_SERVERS, _NUM_PREFIXES, _KEPT = 4, 16, 6
_SUFFIX, _OUTPUT, _BLOCK = 32, 4, 16
_NUM_PROMPTS, _AT_ONCE, _ROUNDS = 96, 8, 5
_NUM_TIMED = 400


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="prefixes,added")
    parser.add_argument("--prefix-tokens", type=int, default=256)
    args = parser.parse_args()
    if "prefixes" in args.rows:
        prefixes(args.prefix_tokens)
    if "added" in args.rows:
        added()


def prefixes(prefix_tokens: int) -> None:
    """Compare the policies over the same servers; their caches are emptied between."""
    blocks = _KEPT * -(-(prefix_tokens + _SUFFIX + _OUTPUT) // _BLOCK)
    flags = ["--cpu-threads", "1", "--block-size", str(_BLOCK), "--num-gpu-blocks-override", str(blocks)]
    flags += ["--max-model-len", str(2 * prefix_tokens), "--max-num-seqs", "4", "--dev-mode"]
    found: dict[str, list[dict[str, float]]] = {"round_robin": [], "prefix": []}
    with ExitStack() as stack:
        *own, rest = shares(_NUM_SERVERS + 1)
        servers = [stack.enter_context(running("serve", "smollm2", *flags, cores=cores)) for cores in own]
        wait_for(*servers)
        os.sched_setaffinity(0, rest)
        urls = [url for url, _ in servers]
        for number in range(1 + _ROUNDS):
            for policy, rows in found.items():
                with running("route", *urls, "--policy", policy) as place:
                    wait_for(place)
                    for server in urls:
                        httpx.post(f"{server}/reset_prefix_cache", timeout=60).raise_for_status()
                    before = computed(urls)
                    told = load(place[0], number, prefix_tokens)
                    if number:
                        rows.append(told | {"computed_tokens": computed(urls) - before})
    for policy, rows in found.items():
        row = {name: statistics.median(r[name] for r in rows) for name in rows[0]}
        print(json.dumps({"row": f"policy {policy}", **row}), flush=True)
    pairs = zip(found["prefix"], found["round_robin"], strict=True)
    ratios = [{name: a[name] / b[name] for name in a} for a, b in pairs]
    medians = {name: round(statistics.median(r[name] for r in ratios), 3) for name in ratios[0]}
    print(json.dumps({"row": "prefix / round_robin", **medians}), flush=True)


def load(url: str, seed: int, prefix_tokens: int) -> dict[str, float]:
    """Run `octavo bench serve` against the router."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["bench", "serve", "--base-url", url, "--model", "smollm2", "--seed", seed, "--ignore-eos"]
        words += ["--num-prompts", _NUM_PROMPTS, "--max-concurrency", _AT_ONCE]
        words += ["--dataset-name", "prefix_repetition", "--prefix-repetition-num-prefixes", _NUM_PREFIXES]
        words += ["--prefix-repetition-prefix-len", prefix_tokens, "--prefix-repetition-suffix-len", _SUFFIX]
        words += ["--prefix-repetition-output-len", _OUTPUT]
        words += ["--save-result", "--result-dir", folder, "--result-filename", "told.json"]
        command = [sys.executable, "-m", "octavo", *map(str, words)]
        subprocess.run(command, check=True, stdout=sys.stderr)
        told: dict[str, Any] = json.loads(Path(folder, "told.json").read_text())
    assert told["completed"] == _NUM_PROMPTS, told
    return {name: round(told[name], 2) for name in ("request_throughput", "median_ttft_ms")}


def computed(urls: list[str]) -> int:
    """Tokens of prompts that the servers have computed."""
    total = 0.0
    for url in urls:
        families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
        values = {s.name: s.value for family in families for s in family.samples if len(s.labels) <= 2}
        total += values["vllm:prompt_tokens_total"] - values["vllm:prefix_cache_hits_total"]
    return int(total)


def added() -> None:
    """Time requests with and without a router, over a server whose model costs nothing."""
    text = "The router reads so much of it as it must. " * 40
    bodies: dict[str, dict[str, Any]] = {
        "models": {},
        "short completion": {"prompt": "hello", "max_tokens": 1},
        "2 kB chat": {"messages": [{"role": "user", "content": text}], "max_tokens": 1},
        "2 kB stream": {"prompt": text, "max_tokens": 8, "stream": True, "ignore_eos": True},
    }
    with ServeProcess() as server, running("route", server.url, "--policy", "prefix") as (url, process):
        wait_for((url, process))
        for name, body in bodies.items():
            times: dict[str, list[float]] = {server.url: [], url: []}
            cpu_s = 0.0
            with httpx.Client() as client:
                for number in range(2 * _NUM_TIMED + 40):
                    place = (server.url, url)[number % 2]
                    began_s, began_cpu_s = time.perf_counter(), sum(process.cpu_times()[:2])
                    ask(client, place, body)
                    if number >= 40:
                        times[place].append(1000 * (time.perf_counter() - began_s))
                        cpu_s += sum(process.cpu_times()[:2]) - began_cpu_s
            direct, through = (statistics.median(t) for t in times.values())
            row = {"direct_ms": direct, "routed_ms": through, "added_ms": through - direct}
            row["router_cpu_ms"] = 1000 * cpu_s / _NUM_TIMED
            print(
                json.dumps({"row": f"added {name}", **{k: round(v, 3) for k, v in row.items()}}), flush=True
            )


def ask(client: httpx.Client, url: str, body: dict[str, Any]) -> None:
    if not body:
        answer = client.get(f"{url}/v1/models")
    else:
        path = "chat/completions" if "messages" in body else "completions"
        answer = client.post(f"{url}/v1/{path}", json=body)
    answer.raise_for_status()


def shares(number: int) -> list[set[int]]:
    """Return so many parts of the cores that this process may use; all of them each time if they are few."""
    cores = sorted(os.sched_getaffinity(0))
    size = len(cores) // number
    if size < 2:
        return [set(cores)] * number
    return [set(cores[place * size :][:size]) for place in range(number)]


@contextmanager
def running(*words: str, cores: set[int] | None = None) -> Iterator[tuple[str, psutil.Process]]:
    """The address of a server or a router, and its process; it may not be ready yet.

    cores: those that it may use; None: those of this process
    """
    port = get_open_port()
    command = [sys.executable, "-m", "octavo", *words, "--port", str(port)]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=sys.stderr)
    if cores is not None:
        os.sched_setaffinity(process.pid, cores)  # before it has threads
    try:
        yield f"http://127.0.0.1:{port}", psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)


def wait_for(*places: tuple[str, psutil.Process]) -> None:
    for url, process in places:
        while process.status() != psutil.STATUS_ZOMBIE:
            try:
                if httpx.get(f"{url}/ready").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        else:
            raise SystemExit(f"{url} has ended.")


if __name__ == "__main__":
    main()
