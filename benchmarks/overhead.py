"""What front and core cost by themselves: a server whose executor does nothing; plain Starlette beside it.

    python benchmarks/record.py overhead python -m benchmarks.overhead

Costs are CPU time of the processes measured, so that other work on the machine changes them little; each
figure is the median of several rounds. Prints one JSON line per figure:

stream    chunks a second that one core can stream, of completions with one chunk per token
request   answers a second of one token, not streamed, on one core
bare      the same two for an application of Starlette that sends prepared bytes, on uvicorn's own server
step      what front and core add to each step of 256 streams: the time from the moment in which the executor
          has a step's tokens to that in which it is given the next step. Meanwhile the core enters the
          tokens, tells the front, and plans. The front writes its chunks while the next step runs: it adds
          what it keeps the core from running, and so do the clients where they share its cores. Of this, the
          CPU time of the core's thread is told too: what is left with a core to itself. In lockstep all
          streams have prompts of one length, and so fill their blocks in the same steps. Beside it, the CPU
          time of the core's process for a step, all threads, from runs of two lengths
refused   milliseconds until 20 clients at once hear that the queue is full
health    milliseconds of /health while 500 streams are served; asked by a process of its own
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import replace
from unittest.mock import patch

import psutil

from octavo.cli.main import main as octavo
from octavo.engine.executor.interface import Executor
from octavo.messages.kv import HeadsKV, KVCacheGroup, ModelReady
from octavo.messages.step import ModelRunnerOutput
from tests.fakes import ByteTokenizer, fake_config
from tests.served_process import ServeProcess

EXECUTOR = "benchmarks.overhead:InstantExecutor"
CHUNK = (
    b'data: {"id":"cmpl-00000000000000000000000000000000","created":1795275602,"model":"fake","choices":'
    b'[{"index":0,"text":"x","logprobs":null,"finish_reason":null,"stop_reason":null}],'
    b'"object":"text_completion","system_fingerprint":"octavo-0.1.0"}\n\n'
)
NUM_STREAMS, NUM_TOKENS, NUM_FEW_TOKENS = 256, 64, 16
BLOCK = 16
NUM_REFUSED, NUM_WATCHED = 20, 500
HEALTH = "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


class InstantExecutor(Executor):
    """Every token is "x". A step lasts `step_s` of the wall's time (checkpoint.config), and no work."""

    def start(self, config):
        self._step_s = config.checkpoint.config.get("step_s", 0.0)
        self._num_prompt = {}
        """By request: length of its prompt."""
        self._num_seats = config.scheduler.max_num_seqs
        self._ended, self._gaps_ms = self._clocks(), []
        spec = HeadsKV(1, 8, "float32", 64)
        return ModelReady(groups=[KVCacheGroup(spec, (0,))], available_bytes=1 << 40)

    def allocate(self, plan):
        """Nothing to allocate."""

    def execute(self, step):
        if len(step.request_ids) == self._num_seats and not step.new_requests:
            gap = zip(self._clocks(), self._ended, strict=True)
            self._gaps_ms.append([1000 * (now - then) for now, then in gap])
        future = Future()
        for request_id in step.released_ids:
            del self._num_prompt[request_id]
        self._num_prompt.update((new.request_id, len(new.token_ids)) for new in step.new_requests)
        sampled = []
        ends = zip(step.request_ids, step.num_computed_tokens, step.num_scheduled_tokens, strict=True)
        for request_id, start, count in ends:
            sampled.append([120] if start + count >= self._num_prompt[request_id] else [])
        if self._step_s:
            time.sleep(self._step_s)
        future.set_result(
            ModelRunnerOutput(
                step_id=step.step_id, sampled_token_ids=sampled, logprobs={}, prompt_logprobs={}, errors={}
            )
        )
        self._ended = self._clocks()
        return future

    def sample(self, masks):
        """Nothing to choose."""

    def call(self, verb, arguments):
        gaps, self._gaps_ms = self._gaps_ms, []
        return [gaps]

    def close(self):
        """Nothing to close."""

    def _clocks(self):
        """Seconds of the wall, and of this thread on a CPU."""
        return time.monotonic(), time.thread_time()


def serve(orders, flags):
    """In a process of its own: `octavo serve` over the executor above."""
    config = fake_config(
        block_size=BLOCK,
        num_blocks=1 << 15,
        max_model_len=1024,
        max_num_seqs=orders.get("seats", NUM_STREAMS),
        max_num_batched_tokens=8192,
    )
    config = replace(
        config,
        parallel=replace(config.parallel, distributed_executor_backend=EXECUTOR),
        checkpoint=replace(config.checkpoint, config={**config.checkpoint.config, **orders}),
    )
    with (
        patch("octavo.serving.process.main_process.resolve", lambda args: config),
        patch("octavo.frontend.async_engine.tokenizer_for", lambda config: ByteTokenizer()),
    ):
        return octavo(["serve", *flags])


def serve_bare(flags):
    """In a process of its own: Starlette alone, on uvicorn's own server."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse, StreamingResponse
    from starlette.routing import Route

    async def chunks():
        for _ in range(NUM_TOKENS):
            yield CHUNK
            await asyncio.sleep(0.1)
        yield b"data: [DONE]\n\n"

    async def completions(request):
        body = await request.json()
        if body.get("stream"):
            return StreamingResponse(chunks(), media_type="text/event-stream")
        return JSONResponse({"choices": [{"text": "x"}]})

    async def health(request):
        return JSONResponse({})

    routes = [Route("/v1/completions", completions, methods=["POST"]), Route("/health", health)]
    uvicorn.run(
        Starlette(routes=routes), port=int(flags[-1]), loop="uvloop", http="httptools", access_log=False
    )


def post(body):
    """A request for a completion."""
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


async def ask(port, body, count):
    """Send a request `count` times on one connection: events received."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    request = post(body)
    num_events = 0
    end = b"0\r\n\r\n" if '"stream"' in body else b"}"
    for _ in range(count):
        writer.write(request)
        tail = b""
        while not tail.endswith(end):
            data = await reader.read(1 << 18)
            if not data:
                raise ConnectionError(tail)
            num_events += data.count(b"data: {")
            tail = (tail + data)[-16:]
    writer.close()
    return num_events


class Load:
    """What a load cost the processes of a server."""

    def __init__(self, server):
        self._processes = [psutil.Process(server.process.pid), *server.children()[:1]]

    def __enter__(self):
        self._before = self._cpu_s()
        self._begun_s = time.monotonic()
        return self

    def __exit__(self, *_):
        self.wall_s = time.monotonic() - self._begun_s
        used = [after - before for before, after in zip(self._before, self._cpu_s(), strict=True)]
        self.front_s, self.core_s = used[0], sum(used[1:])

    def _cpu_s(self):
        return [sum(process.cpu_times()[:2]) for process in self._processes]


def stream_of(num_tokens, prompt="hello"):
    return json.dumps({"prompt": prompt, "max_tokens": num_tokens, "stream": True, "ignore_eos": True})


async def streams(server, num_tokens=NUM_TOKENS, num_lengths=BLOCK):
    """num_lengths: of the prompts; 1: all streams fill their blocks in the same steps."""
    bodies = [stream_of(num_tokens, "hello" + "!" * (i % num_lengths)) for i in range(NUM_STREAMS)]
    with Load(server) as load:
        counts = await asyncio.gather(*(ask(server.port, body, 1) for body in bodies))
    return sum(counts), load


async def requests(server, count=40, clients=32):
    body = json.dumps({"prompt": "hello", "max_tokens": 1})
    with Load(server) as load:
        await asyncio.gather(*(ask(server.port, body, count) for _ in range(clients)))
    return count * clients, load


async def latencies(port, request, status, num_clients, count, pause_s=0.0):
    """Milliseconds from a request to its answer, of so many clients at once, each on one connection."""
    found = []

    async def one_client():
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(count):
            begun_s = time.monotonic()
            writer.write(request)
            answer = await reader.readuntil(b"}" if status == 200 else b"}}")
            found.append(1000 * (time.monotonic() - begun_s))
            assert answer.startswith(b"HTTP/1.1 %d" % status), answer
            await asyncio.sleep(pause_s)
        writer.close()

    await asyncio.gather(*(one_client() for _ in range(num_clients)))
    return found


@asynccontextmanager
async def served_streams(server, count):
    """So many, that do not end before what is measured meanwhile."""
    tasks = [asyncio.create_task(ask(server.port, stream_of(1000), 1)) for _ in range(count)]
    await asyncio.sleep(2.0)
    yield
    assert not any(task.done() for task in tasks), "all the while"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def refusals(server, num_seats):
    """While the seats and the queue are taken."""
    async with served_streams(server, num_seats * 5):
        return await latencies(server.port, post(stream_of(16)), 503, NUM_REFUSED, 100)


async def watched(server):
    """/health, asked by another process while many streams are served."""
    program = [sys.executable, "-m", "benchmarks.overhead", "--watch", str(server.port)]
    async with served_streams(server, NUM_WATCHED):
        process = await asyncio.create_subprocess_exec(*program, stdout=asyncio.subprocess.PIPE)
        told, _ = await process.communicate()
    return json.loads(told)


def show_gaps(gaps, suffix):
    """Two lines: of the wall, and of the CPU."""
    for clock, values in zip(("", "of the core's CPU "), zip(*gaps, strict=True), strict=True):
        show_latencies(f"octavo: ms {clock}between two steps of {NUM_STREAMS} streams{suffix}", values)


def show_latencies(figure, values):
    """One line: the median, and what few exceed."""
    values = sorted(values)
    places = {
        f"p{p}": round(values[min(len(values) - 1, len(values) * p // 100)], 2) for p in (50, 80, 95, 99)
    }
    print(
        json.dumps({"figure": figure, **places, "max": round(values[-1], 2), "of": len(values)}), flush=True
    )


def show(figure, values, of="rounds"):
    """One line: the median, and what it is the median of."""
    row = {"figure": figure, "median": round(statistics.median(values), 3)}
    print(json.dumps({**row, of: [round(value, 3) for value in values]}), flush=True)


def measure(name, orders, num_rounds):
    """The figures of one server."""
    program = ["-m", "benchmarks.overhead", "--serve", name, json.dumps(orders)]
    with ServeProcess("--disable-access-log", "--dev-mode", program=program) as server:
        short = [asyncio.run(streams(server, NUM_FEW_TOKENS)) for _ in range(num_rounds + 1)][1:]
        long = [asyncio.run(streams(server)) for _ in range(num_rounds)]
        gaps = gaps_of(server) if name == "octavo" else []
        if name == "octavo":
            asyncio.run(streams(server, num_lengths=1))
            lockstep = gaps_of(server)
        answered = [asyncio.run(requests(server)) for _ in range(num_rounds + 1)][1:]
    show(f"{name}: chunks/s per core of the front", [count / load.front_s for count, load in long])
    show(f"{name}: requests/s per core of the front", [count / load.front_s for count, load in answered])
    if name == "octavo":
        both = [count / (load.front_s + load.core_s) for count, load in answered]
        show("octavo: requests/s on one core, front and core together", both)
        ms_per_step = 1000 / (NUM_TOKENS - NUM_FEW_TOKENS)
        core = [ms_per_step * (b.core_s - a.core_s) for (_, a), (_, b) in zip(short, long, strict=True)]
        show(f"octavo: ms of the core's CPU per step of {NUM_STREAMS} streams", core)
        show_gaps(gaps, "")
        show_gaps(lockstep, " in lockstep")


def measure_answers():
    """What answers take that are no work for the engine."""
    program = ["-m", "benchmarks.overhead", "--serve", "octavo"]
    for seats, step_s, figure, run in (
        (4, 0.05, f"ms to refuse {NUM_REFUSED} at once", lambda server: refusals(server, 4)),
        (NUM_WATCHED, 0.2, f"ms of /health at {NUM_WATCHED} streams", watched),
    ):
        orders = json.dumps({"seats": seats, "step_s": step_s})
        with ServeProcess("--disable-access-log", program=[*program, orders]) as server:
            show_latencies(f"octavo: {figure}", asyncio.run(run(server)))


def gaps_of(server):
    """Milliseconds between two steps of all streams, by clock, since this was last asked."""
    answer = server.post("/collective_rpc", {"method": "gaps"})
    return answer.json()["results"][0]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--serve", nargs=2, metavar=("NAME", "ORDERS"), help="be the server; used by itself")
    parser.add_argument("--watch", type=int, metavar="PORT", help="ask for /health; used by itself")
    parser.add_argument("--only", choices=("throughput", "answers"), help="measure less")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--step-s", type=float, default=0.1)
    args, flags = parser.parse_known_args()
    if args.serve:
        name, orders = args.serve
        return serve(json.loads(orders), flags) if name == "octavo" else serve_bare(flags)
    if args.watch:
        print(json.dumps(asyncio.run(latencies(args.watch, HEALTH.encode(), 200, 1, 200, 0.02))))
        return 0
    if args.only != "answers":
        measure("octavo", {"step_s": args.step_s}, args.rounds)
        measure("bare", {}, args.rounds)
    if args.only != "throughput":
        measure_answers()
    return 0


if __name__ == "__main__":
    sys.exit(main())
