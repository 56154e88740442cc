"""What one bad request costs everybody else: /health and a stream beside it, on the default model.

    python benchmarks/record.py bad-input python -m benchmarks.bad_input --before FOLDER

For each case a server of its own; with --before FOLDER (another checkout of octavo) that one's server first,
in turn. Prints one JSON line per case and tree:

health p99, max    milliseconds of GET /health, one after the other, until the case is answered (60 s at most)
longest gap        seconds between two chunks of a stream that runs all the while
answer, took       the case's status, or what is said in the table of cases, and its seconds
"""

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path

import httpx
import psutil

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 60.0
COMPLETIONS = "/v1/completions"
AMBIGUOUS = 'start: s\ns: s s s | s s | "a" | "b"'


def body(**fields: object) -> bytes:
    return json.dumps({"prompt": "Once upon a time", "max_tokens": 1, **fields}).encode()


async def post(client: httpx.AsyncClient, content: bytes, path: str = COMPLETIONS) -> str:
    answer = await client.post(path, content=content, headers={"Content-Type": "application/json"})
    return str(answer.status_code)


def request(**fields: object) -> Callable[[httpx.AsyncClient, psutil.Process], Awaitable[str]]:
    content = body(**fields)
    return lambda client, process: post(client, content)


async def unfinished_bodies(client: httpx.AsyncClient, process: psutil.Process) -> str:
    """60 bodies of 16 MiB, each without its last byte: how much memory the front takes."""
    before, open_sockets = process.memory_info().rss, []
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    for _ in range(60):
        sender = socket.create_connection((client.base_url.host, client.base_url.port), timeout=10)
        open_sockets.append(sender)
        sender.sendall(f"{head}Content-Length: 16777206\r\n\r\n".encode())
        for _ in range(16):
            await asyncio.to_thread(sender.sendall, b" " * (2**20 - 1))
    grown = process.memory_info().rss - before
    for sender in open_sockets:
        sender.close()
    return f"{grown / 2**20:.0f} MiB more"


async def grammar_in_a_queue(client: httpx.AsyncClient, process: psutil.Process) -> str:
    """A small regular expression behind eight hostile choices: when it is answered."""
    hostile = body(structured_outputs={"choice": [f"{i:06}" * 3 for i in range(30_000)]})
    crowd = [asyncio.create_task(post(client, hostile)) for _ in range(8)]
    await asyncio.sleep(0.5)
    began_s = time.perf_counter()
    await post(client, body(structured_outputs={"regex": "[a-z]{3}"}))
    waited_s = time.perf_counter() - began_s
    for task in crowd:
        task.cancel()
    return f"{waited_s:.2f} s"


async def in_background(client: httpx.AsyncClient, process: psutil.Process) -> str:
    """A plain completion behind 300 responses in the background: when it is answered."""
    asked = {"input": "hello", "background": True, "max_output_tokens": 900}
    for _ in range(300):
        await post(client, json.dumps(asked).encode(), "/v1/responses")
    began_s = time.perf_counter()
    await post(client, body())
    return f"{time.perf_counter() - began_s:.2f} s"


CASES = {
    "nothing": request(),
    "a prompt of 4,000 tokens": request(prompt=[1000 + i % 40_000 for i in range(4000)]),
    "64 beams, 20 tokens": request(n=64, use_beam_search=True, temperature=0, max_tokens=20),
    "1,000,000 keys in logit_bias": request(logit_bias={str(i): 1 for i in range(10**6)}),
    "1,000,000 unknown keys": request(**{f"k{i}": 1 for i in range(10**6)}),
    "8,000,000 token ids": request(prompt=[1] * 8_000_000),
    "60 unfinished bodies of 16 MiB": unfinished_bodies,
    "an ambiguous grammar, 300 tokens": request(structured_outputs={"grammar": AMBIGUOUS}, max_tokens=300),
    "a regex behind 8 hostile choices": grammar_in_a_queue,
    "a completion behind 300 background responses": in_background,
}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", default="", help="Another checkout, measured beside this one.")
    parser.add_argument("--before-packages", default="", help="Folder of packages that only that one needs.")
    args = parser.parse_args()
    trees = {"now": str(ROOT)}
    if args.before:
        trees = {"before": os.pathsep.join(filter(None, (args.before, args.before_packages))), **trees}
    for name, case in CASES.items():
        for tree, path in trees.items():
            row = await measured(case, path)
            print(json.dumps({"case": name, "octavo": tree, **row}), flush=True)


async def measured(case: Callable[..., Awaitable[str]], path: str) -> dict[str, object]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "octavo", "serve", "--port", str(port)]
    environment = os.environ | {"PYTHONPATH": path}
    folder = path.split(os.pathsep, maxsplit=1)[0]
    server = subprocess.Popen(command, env=environment, cwd=folder, stdout=2, stderr=subprocess.DEVNULL)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=LIMIT_S) as client:
            await ready(client)
            await post(client, body(max_tokens=4))
            return await beside(client, case, psutil.Process(server.pid))
    finally:
        server.terminate()
        try:
            server.wait(5)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


async def ready(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(120):
        while True:
            try:
                if (await client.get("/ready")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.2)


async def beside(
    client: httpx.AsyncClient, case: Callable[..., Awaitable[str]], process: psutil.Process
) -> dict[str, object]:
    health_ms: list[float] = []
    chunks_s: list[float] = []
    watchers = [asyncio.create_task(watch(client, health_ms)), asyncio.create_task(stream(client, chunks_s))]
    await asyncio.sleep(1.0)
    health_ms.clear()
    chunks_s.clear()
    began_s = time.perf_counter()
    try:
        async with asyncio.timeout(LIMIT_S):
            answer = await case(client, process)
    except (TimeoutError, httpx.HTTPError):
        answer = "none"
    took_s = time.perf_counter() - began_s
    await asyncio.sleep(0.3)
    moments_s = [began_s, *chunks_s, time.perf_counter()]
    for watcher in watchers:
        watcher.cancel()
    ranked = sorted(health_ms) or [1e3 * took_s]
    return {
        "answer": answer,
        "took s": took_s,
        "health p99 ms": ranked[int(0.99 * len(ranked))],
        "health max ms": ranked[-1],
        "longest gap s": max(later - earlier for earlier, later in pairwise(moments_s)),
    }


async def watch(client: httpx.AsyncClient, taken_ms: list[float]) -> None:
    while True:
        began_s = time.perf_counter()
        await client.get("/health")
        taken_ms.append(1e3 * (time.perf_counter() - began_s))
        await asyncio.sleep(0.01)


async def stream(client: httpx.AsyncClient, chunks_s: list[float]) -> None:
    content = body(max_tokens=4000, stream=True, ignore_eos=True)
    headers = {"Content-Type": "application/json"}
    async with client.stream("POST", COMPLETIONS, content=content, headers=headers) as answer:
        async for _ in answer.aiter_bytes():
            chunks_s += [time.perf_counter()]


if __name__ == "__main__":
    asyncio.run(main())
