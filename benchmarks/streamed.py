"""A server on the shared workloads, streamed: all requests at once, prompts as token ids.

    python benchmarks/peers_cpu.py --scripts FOLDER …
        octavo='python streamed.py --vocab 49000 --model FILE --serve "octavo serve FILE --port {port}"'

Starts the server, waits for its first token, and prints a JSON line per workload and repeat, like the scripts
of FOLDER, whose module `workloads` it uses. Works with any server that has OpenAI's /v1/completions and takes
token ids there. One process and one thread reads all streams and looks only for the ends of events, to leave
the cores to the server. `first_token_s` counts from the start of the server's process.
"""

import argparse
import asyncio
import json
import shlex
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import workloads

Work = list[tuple[list[int], int]]
_EVENT = b"data: {"
_LONGEST_START_S = 400
_WARM_UP: Work = [([2 + i] * 40, 8) for i in range(4)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--serve", required=True, metavar="COMMAND", help="with {port} for the port")
    parser.add_argument("--model", required=True, help="its name at the server")
    parser.add_argument("--vocab", type=int, required=True)
    parser.add_argument("--workloads", default="W1,W2,W3,W4,W5")
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    began = time.monotonic()
    with server(args.serve.format(port=port)) as process:
        wait_for_token(process, port, args.model)
        start = {"engine": "server", "first_token_s": round(time.monotonic() - began, 2)}
        asyncio.run(run(_WARM_UP, port, args.model))
        for repeat in range(args.repeat):
            for name in args.workloads.split(","):
                work = workloads.make(name, args.vocab, repeat)
                seconds, first_s = asyncio.run(run(work, port, args.model))
                extra = {"rep": repeat, **start, "ttft_ms": round(1000 * first_s, 1)}
                print(json.dumps(workloads.row(name, work, seconds, extra)), flush=True)
    return 0


@contextmanager
def server(command: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Runs meanwhile."""
    process = subprocess.Popen(shlex.split(command), stdout=sys.stderr)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def wait_for_token(process: "subprocess.Popen[bytes]", port: int, model: str) -> None:
    end = time.monotonic() + _LONGEST_START_S
    while True:
        try:
            asyncio.run(run([([2, 3, 4, 5], 1)], port, model))
        except (OSError, asyncio.IncompleteReadError):  # nobody listens yet, or the model is loading
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit("the server did not start") from None
            time.sleep(0.05)
        else:
            return


async def run(work: Work, port: int, model: str) -> tuple[float, float]:
    """Seconds until all requests were answered, and the median of seconds to a first event."""
    began = time.perf_counter()
    firsts = await asyncio.gather(*(ask(prompt, length, port, model) for prompt, length in work))
    return time.perf_counter() - began, statistics.median(firsts) - began


async def ask(prompt: list[int], length: int, port: int, model: str) -> float:
    """Stream an answer of `length` tokens; when its first event came."""
    wanted = {"model": model, "prompt": prompt, "max_tokens": length, "temperature": 0, "ignore_eos": True}
    body = json.dumps({**wanted, "stream": True, "stream_options": {"include_usage": True}})
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    try:
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        status = await reader.readuntil(b"\r\n")
        if b" 503 " in status:
            raise ConnectionRefusedError(status)
        assert b" 200 " in status, status + await reader.read()
        answer = await reader.readuntil(_EVENT)
        first = time.perf_counter()
        answer += await reader.readuntil(b"data: [DONE]")
    finally:
        writer.close()
    told = answer[answer.rindex(b'"completion_tokens":') + 20 :]
    assert int(told.split(b",")[0].split(b"}")[0]) == length, told
    return first


if __name__ == "__main__":
    sys.exit(main())
