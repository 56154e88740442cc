"""Use a server as the world does, for as long as you like, and see that nothing is left of it.

    python tools/soak.py --minutes 60 [--clients 24] [--output report.json] [-- flags of octavo serve]
    python tools/soak.py --minutes 40 --stand-in -- --max-num-seqs 32

--stand-in: a model that does nothing takes the place of a real one, for many more requests in the same time.

Clients of all kinds at once: answers whole and in streams, of many shapes; 30 % leave with a reset at any
moment, 10 % send what is wrong, 5 % read slowly. Every answer must end as it should. After each part of the
run, which is told in a line, the server is left alone: then no request is open, no block in use, no file
descriptor or thread more than before, a canary's text is what it was, and the memory of each process (RssAnon
and what of it was swapped out) is noted. How that grows is told for the second half of the run, with the
standard error: memory at rest goes up and down by some MB with the largest bodies of late.

tests/integration/test_soak.py is a short run of it. Ends with status 1 when something is wrong.
"""

import argparse
import asyncio
import json
import math
import os
import random
import re
import signal
import socket
import struct
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import linear_regression, pvariance
from typing import Any

import psutil

_ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(_ROOT))  # run as a script, from any folder

from tests.served_process import ServeProcess  # noqa: E402

NUM_CLIENTS = 24
_IDLE_S = 20.0
_POOL_THREADS = min(32, (os.cpu_count() or 1) + 4)
"""Of asyncio's pool, which starts a thread when all others are busy."""
_WATCHED = (":num_requests_running", ":num_requests_waiting", ":kv_cache_usage_perc")
_RESET = struct.pack("ii", 1, 0)
_WRONG = [
    b"{",
    b"null",
    b'{"prompt": "a", "temperature": -1}',
    b'{"prompt": [[]]}',
    b'{"prompt": [99999999]}',
    b'{"prompt": "a", "n": 99999999}',
    b'{"prompt": "a", "model": "nobody"}',
    b'{"prompt": "' + b"a" * 3_000_000 + b'"}',
    b"[" * 50_000,
]
_WORDS = ["the", "sea", "remembers", "every", "name", "that", "rain", "washed", "away", "from", "stones"]


@dataclass
class Report:
    """What was seen."""

    kinds: Counter = field(default_factory=Counter)
    """Requests by kind and outcome."""
    faults: list[str] = field(default_factory=list)
    memory_mb: dict[str, list[float]] = field(default_factory=dict)
    """By process, at rest after each part; the first one is after the warm-up."""
    num_requests: list[int] = field(default_factory=list)
    """Until then."""

    took_s: list[float] = field(default_factory=list)
    """And seconds."""

    def growth(self, process: str) -> tuple[float, float]:
        """MB per 100,000 requests in the second half of the run, and the standard error of that."""
        half = len(self.num_requests) // 2
        return _slope([count / 1e5 for count in self.num_requests[half:]], self.memory_mb[process][half:])

    def lines(self) -> list[str]:
        """For people to read."""
        kinds = [f"{count:8} {kind}: {outcome}" for (kind, outcome), count in sorted(self.kinds.items())]
        for process, sizes in self.memory_mb.items():
            slope, error = self.growth(process)
            kinds.append(f"{process}, MB at rest: {sizes}; {slope:.1f} ± {error:.1f} per 100,000 requests")
        return kinds

    def to_json(self) -> dict[str, Any]:
        """For other programs."""
        return {
            "requests": {
                f"{kind}: {outcome}": count for (kind, outcome), count in sorted(self.kinds.items())
            },
            "seconds": self.took_s[-1],
            "requests_until_rest": self.num_requests,
            "memory_at_rest_mb": self.memory_mb,
            "growth_mb_per_100000_requests": {
                process: [round(value, 2) for value in self.growth(process)] for process in self.memory_mb
            },
            "faults": self.faults,
        }


def _slope(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Of the least-squares line, and its standard error; infinite where there are too few points."""
    if len(xs) < 3:
        return 0.0, math.inf
    slope, intercept = linear_regression(xs, ys)
    rest = sum((y - slope * x - intercept) ** 2 for x, y in zip(xs, ys, strict=True))
    return slope, math.sqrt(rest / (len(xs) - 2) / (len(xs) * pvariance(xs)))


class Soak:
    """One run against a server on this machine."""

    def __init__(self, port: int, pid: int, seed: int = 0, num_clients: int = NUM_CLIENTS) -> None:
        self._port = port
        self._pid = pid
        self._random = random.Random(seed)
        self._num_clients = num_clients
        self.report = Report()

    async def run(
        self,
        seconds: float,
        num_parts: int = 6,
        tell: Callable[[str], object] = lambda line: None,
        *,
        min_requests: int = 0,
    ) -> Report:
        """Use the server for about `seconds`: a warm-up and so many parts, each until it is at rest again.

        min_requests: of each part, which lasts longer where the machine is busy with other things
        """
        self._begun_s = time.monotonic()
        self._canary = await self._canary_text()
        before: list[tuple[int, int]] = []
        for number in range(num_parts + 1):
            end_s = self._begun_s + (number + 1) * seconds / (num_parts + 1)
            await self._part(end_s, self.report.kinds.total() + min_requests)
            await self._rest()
            before = before or self._handles()
            tell(f"part {number} of {num_parts}: {self._state()}")
        after = self._handles()
        if len(before) != len(after) or any(map(_has_grown, before, after)):
            self.report.faults.append(f"(descriptors, threads) by process: {before} before, {after} after")
        return self.report

    def _state(self) -> str:
        report = self.report
        done = f"{report.num_requests[-1]} requests in {report.took_s[-1]:.0f} s"
        sizes = ", ".join(f"{process} {sizes[-1]} MB" for process, sizes in report.memory_mb.items())
        return f"{done}, {sizes} at rest, {len(report.faults)} faults"

    async def _part(self, end_s: float, num_requests: int) -> None:
        await asyncio.gather(*(self._client(end_s, num_requests) for _ in range(self._num_clients)))

    async def _client(self, end_s: float, num_requests: int) -> None:
        while time.monotonic() < end_s or self.report.kinds.total() < num_requests:
            chance = self._random.random()
            if chance < 0.3:
                kind, work = "left", self._leave()
            elif chance < 0.4:
                kind, work = "wrong", self._ask(self._random.choice(_WRONG), "/v1/completions")
            elif chance < 0.45:
                kind, work = "slow", self._ask(*self._shape(), pause_s=0.02)
            elif chance < 0.47:
                kind, work = "canary", self._check_canary()
            else:
                kind, work = "plain", self._ask(*self._shape())
            try:
                outcome = await asyncio.wait_for(work, 120)
            except (OSError, TimeoutError, ValueError) as error:
                outcome = type(error).__name__
                self.report.faults.append(f"{kind}: {error!r}")
            self.report.kinds[kind, outcome] += 1

    def _shape(self) -> tuple[bytes, str]:
        """A request as somebody might send it: body and path."""
        draw = self._random
        text = " ".join(draw.choices(_WORDS, k=draw.choice((1, 5, 30, 100))))
        body: dict = {"max_tokens": draw.choice((1, 4, 16, 48)), "stream": draw.random() < 0.5}
        body |= draw.choice(({}, {"n": 3}, {"seed": 7}, {"stop": ["e"]}, {"ignore_eos": True}, {"top_k": 5}))
        if draw.random() < 0.4:
            body |= {"messages": [{"role": "user", "content": text}]}
            body |= draw.choice(({}, {"logprobs": True, "top_logprobs": 1}))
            return json.dumps(body).encode(), "/v1/chat/completions"
        body |= {"prompt": [text, text[:5]] if draw.random() < 0.2 else text}
        body |= draw.choice(({}, {"logprobs": 1}, {"echo": True}, {"repetition_penalty": 1.2}))
        return json.dumps(body).encode(), "/v1/completions"

    async def _ask(self, body: bytes, path: str, pause_s: float = 0) -> str:
        """Send, read to the end, judge the end."""
        reader, writer = await self._send(body, path)
        heard = b""
        try:
            while data := await reader.read(512 if pause_s else 1 << 16):
                heard += data
                await asyncio.sleep(pause_s)
        finally:
            writer.close()
        self._judge(body, heard)
        return heard[9:12].decode() or "nothing"

    def _judge(self, body: bytes, heard: bytes) -> None:
        status = heard[9:12]
        if status == b"200":
            is_stream = b"text/event-stream" in heard
            good = heard.count(b"data: [DONE]\n\n") == 1 if is_stream else heard.endswith(b"}")
            good = good and b'"finish_reason":"' in heard
        elif status in (b"503", b"429"):
            good = b"retry-after" in heard.lower()
        else:
            good = status in (b"400", b"404", b"413") and body in _WRONG
        if not good:
            self.report.faults.append(f"{body[:100]!r} was answered {heard[:300]!r} … {heard[-200:]!r}")

    async def _leave(self) -> str:
        """Reset the connection at a random moment."""
        body, path = self._shape()
        if self._random.random() < 0.2:
            body = body[: len(body) // 2] + b" " * (len(body) - len(body) // 2)
        _, writer = await self._send(body, path)
        await asyncio.sleep(self._random.choice((0, 0.001, 0.01, 0.05, 0.2)) * self._random.random())
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        writer.transport.abort()
        return "reset"

    async def _send(self, body: bytes, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        return reader, writer

    async def _canary_text(self) -> str:
        """What the server says to one fixed request; "" when it is too busy."""
        body = json.dumps({"prompt": "The sea", "max_tokens": 12, "temperature": 0, "seed": 1})
        reader, writer = await self._send(body.encode(), "/v1/completions")
        heard = await reader.read()
        writer.close()
        found = re.search(rb'"text":("(?:[^"\\]|\\.)*")', heard)
        return json.loads(found[1]) if found else ""

    async def _check_canary(self) -> str:
        text = await self._canary_text()
        if text not in ("", self._canary):
            self.report.faults.append(f"the canary says {text!r}, not {self._canary!r}")
        return "same" if text else "refused"

    async def _rest(self) -> None:
        """Wait until nothing is under way, and note the memory."""
        await asyncio.to_thread(self._wait_until_idle)
        await asyncio.sleep(1.0)
        for number, process in enumerate(self._processes()):
            name = ("front", "core", "templates")[number] if number < 3 else f"process {number}"
            self.report.memory_mb.setdefault(name, []).append(round(_anonymous_mb(process.pid), 2))
        self.report.num_requests.append(self.report.kinds.total())
        self.report.took_s.append(round(time.monotonic() - self._begun_s, 1))

    def _wait_until_idle(self) -> None:
        deadline = time.monotonic() + _IDLE_S
        while busy := self._busy():
            if time.monotonic() > deadline:
                self.report.faults.append(f"not at rest: {busy}")
                return
            time.sleep(0.1)

    def _busy(self) -> list[str]:
        lines = self._get("/metrics").splitlines()
        gauges = [line for line in lines if line.partition("{")[0].endswith(_WATCHED)]
        found = [line for line in gauges if float(line.rpartition(" ")[2])]
        load = json.loads(self._get("/load"))["server_load"]
        return found + ([f"{load} requests open"] if load else [])

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}{path}", timeout=30) as answer:
            return answer.read().decode()

    def _processes(self) -> list[psutil.Process]:
        server = psutil.Process(self._pid)
        return [server, *server.children(recursive=True)]

    def _handles(self) -> list[tuple[int, int]]:
        return [(process.num_fds(), process.num_threads()) for process in self._processes()]


def _has_grown(before: tuple[int, int], after: tuple[int, int]) -> bool:
    """Whether a process has more descriptors, or more threads than pools of a fixed size may start late."""
    return after[0] > before[0] or after[1] > before[1] + _POOL_THREADS


def _anonymous_mb(pid: int) -> float:
    with Path(f"/proc/{pid}/status").open(encoding="ascii") as status:
        sizes = dict(line.split(":", 1) for line in status)
    return sum(int(sizes[name].split()[0]) for name in ("RssAnon", "VmSwap")) / 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--parts", type=int, help="one for two minutes, 4 at least, if not given")
    parser.add_argument("--clients", type=int, default=NUM_CLIENTS, help="at the same time")
    parser.add_argument("--stand-in", action="store_true", help="instead of a real model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="file for the report, as JSON")
    parser.add_argument("flags", nargs="*", help="of octavo serve, behind --")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    num_parts = args.parts or max(4, round(args.minutes / 2))
    program = None if args.stand_in else ["-m", "octavo", "serve"]
    flags = [*args.flags, "--disable-access-log"]
    with ServeProcess(*flags, program=program, cwd=_ROOT, stdout=None, stderr=None) as server:
        soak = Soak(server.port, server.process.pid, args.seed, args.clients)
        report = asyncio.run(soak.run(60 * args.minutes, num_parts, partial(print, flush=True)))
        server.signal()
        code = server.end()
    print(*report.lines(), sep="\n")
    print(f"{len(report.faults)} faults; the server ended with {code}", *report.faults[:20], sep="\n  ")
    if args.output:
        args.output.write_text(json.dumps({"flags": args.flags, **report.to_json()}, indent=1) + "\n")
    return int(bool(report.faults or code))


if __name__ == "__main__":
    sys.exit(main())
