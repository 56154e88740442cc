"""How long the server that decodes waits for the keys and values of a prompt that another one computes.

    python benchmarks/record.py prefill-decode python -m benchmarks.prefill_decode --before FOLDER --mbit 1000

Two servers with the default model, one thread each: the first computes a prompt and pushes its blocks, the
second goes on when the first has answered, as behind a proxy. Told are medians over prompts of random tokens:
the first server's time, the second's until its first token, and both together. FOLDER is a checkout of
another commit, whose servers take turns with these. --mbit: between the servers is a network so fast (two
namespaces; takes root, ip and tc), not this host's memory.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.route import wait_for
from octavo.names.helpers import get_open_port

_KEY = "a secret that both servers know"
_LENGTHS = (1024, 4096)
_ROUNDS, _UNTOLD = 6, 2
_BLOCKS = "640"
"""Few: all have been written to before the times are told."""
_NAMES = "octavo-first", "octavo-second"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path)
    parser.add_argument("--rounds", type=int, default=_ROUNDS)
    parser.add_argument("--mbit", type=int, default=0)
    parser.add_argument("--apart", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.mbit and not args.apart:
        with network(args.mbit):
            command = ["ip", "netns", "exec", _NAMES[0], sys.executable, "-m", "benchmarks.prefill_decode"]
            subprocess.run([*command, "--apart", *sys.argv[1:]], check=True)
        return
    hosts = ["10.27.0.1", "10.27.0.2"] if args.apart else ["127.0.0.1"] * 2
    folders = {"now": Path.cwd()} | ({"before": args.before} if args.before else {})
    with ExitStack() as stack:
        pairs = {name: stack.enter_context(pair(folder, hosts)) for name, folder in folders.items()}
        for length in _LENGTHS:
            times: dict[str, list[tuple[float, float]]] = {name: [] for name in pairs}
            for number in range(args.rounds + _UNTOLD):
                for name, (urls, target) in list(pairs.items())[:: 1 - 2 * (number % 2)]:
                    prompt = random.Random(1000 * length + number).choices(range(1000, 40000), k=length)
                    times[name].append(ask(*urls, target, prompt))
            for name, found in times.items():
                told = found[_UNTOLD:]
                columns = [*zip(*told, strict=True), [sum(each) for each in told]]
                medians = [round(1000 * statistics.median(column), 1) for column in columns]
                row = dict(zip(("first_ms", "second_ms", "first_token_ms"), medians, strict=True))
                link = f"{args.mbit} Mbit/s" if args.mbit else "one host"
                print(json.dumps({"row": f"{length} tokens, {link}, {name}", **row}), flush=True)


def ask(first: str, second: str, target: dict[str, Any], prompt: list[int]) -> tuple[float, float]:
    """Seconds that the first server takes, and the second until its first token."""
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    named = {"do_remote_decode": True, **target}
    began_s = time.perf_counter()
    answer = httpx.post(f"{first}/v1/completions", json=body | {"kv_transfer_params": named}, timeout=60)
    params, done_s = answer.json()["kv_transfer_params"], time.perf_counter()
    body |= {"stream": True, "max_tokens": 2, "kv_transfer_params": params}
    with httpx.stream("POST", f"{second}/v1/completions", json=body, timeout=60) as stream:
        next(line for line in stream.iter_lines() if line.startswith("data: {"))
        return done_s - began_s, time.perf_counter() - done_s


@contextmanager
def pair(folder: Path, hosts: list[str]) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """The addresses of both servers of a checkout, and where the second takes blocks."""
    urls, processes, kv_port = [], [], 0
    for place, role in enumerate(("kv_producer", "kv_consumer")):
        port, kv_port = get_open_port(), get_open_port()
        where = {"kv_ip": hosts[place], "kv_port": kv_port}
        transfer = {"kv_connector": "TCPConnector", "kv_role": role, **where}
        command = [sys.executable, "-m", "octavo", "serve", "smollm2", "--max-model-len", "8192"]
        command += ["--cpu-threads", "1", "--num-gpu-blocks-override", _BLOCKS, "--host", hosts[place]]
        command += ["--port", str(port), "--insecure", "--kv-transfer-config", json.dumps(transfer)]
        if hosts[0] != hosts[1]:
            command = ["ip", "netns", "exec", _NAMES[place], *command]
        own = {"OCTAVO_NODE_KEY": _KEY, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, env={**os.environ, **own}, stdout=sys.stderr, cwd=folder)
        urls.append(f"http://{hosts[place]}:{port}")
        processes.append(process)
    try:
        for url, process in zip(urls, processes, strict=True):
            wait_for((url, psutil.Process(process.pid)))
        yield urls, {"remote_host": hosts[1], "remote_port": kv_port}
    finally:
        for process in processes:
            process.terminate()
            process.wait(60)


@contextmanager
def network(mbit: int) -> Iterator[None]:
    """Two networks of their own, joined by a link so fast."""
    first, second = _NAMES
    ends = list(zip(_NAMES, ("one", "two"), ("10.27.0.1/24", "10.27.0.2/24"), strict=True))
    orders = [f"ip netns add {name}" for name in _NAMES]
    orders.append(f"ip link add one netns {first} type veth peer name two netns {second}")
    for name, end, address in ends:
        orders += [f"ip -n {name} addr add {address} dev {end}", f"ip -n {name} link set {end} up"]
        limit = f"rate {mbit}mbit burst 256kb latency 50ms"
        orders += [f"ip -n {name} link set lo up", f"tc -n {name} qdisc add dev {end} root tbf {limit}"]
    try:
        for order in orders:
            subprocess.run(order.split(), check=True)
        yield
    finally:
        for name in _NAMES:
            subprocess.run(["ip", "netns", "del", name], check=False)


if __name__ == "__main__":
    main()
