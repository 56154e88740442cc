"""What the host does in a decoding step: CPU time of each part, without a device.

    python benchmarks/record.py host python -m benchmarks.host [--requests 256,1024] [--rounds 20] …

Greedy requests, two steps in flight; ms per step, the smallest mean of a round of 64 steps, in which each
sequence fills one block. Tokens are random ids of the default model. One JSON line each:

core            all of `EngineCore.step`, with an executor that returns at once; schedule, update: within it
runner          `ModelRunner.execute` and reading its result, with a recorded step that launches nothing
encode, decode  a step's outputs between two processes
front           `OutputProcessor.process` of ids alone, final texts, texts so far, deltas into streams
read            deltas taken from their streams by as many readers on an event loop
processes       `AsyncLLM` with as many readers of deltas: CPU time of its process, and of the core's
"""

import argparse
import asyncio
import cProfile
import json
import pstats
import random
import sys
import time
from collections import defaultdict
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import msgspec
import psutil
import torch

from octavo.base.hub import locate
from octavo.config.model import DEFAULT_MODEL
from octavo.engine.core import EngineCore
from octavo.engine.executor.interface import Executor
from octavo.frontend.async_engine import AsyncLLM
from octavo.frontend.output_processor import OutputProcessor
from octavo.frontend.outputs.output_stream import OutputStream
from octavo.frontend.requests.input_processor import InputProcessor
from octavo.frontend.requests.prompts import TokensPrompt
from octavo.frontend.text.loader import load_tokenizer
from octavo.messages.kv import HeadsKV, KVCacheGroup, ModelReady
from octavo.messages.request import EngineOutputs
from octavo.messages.sampling import RequestOutputKind, SamplingParams
from octavo.messages.step import ModelRunnerOutput
from octavo.runtime.heads.token import TokenHead
from octavo.runtime.kernels.choice import TORCH_SAMPLING
from octavo.runtime.kernels.ref.steps import STEP_KERNELS
from octavo.runtime.models.interface import Model
from octavo.runtime.sampling.sampler import Sampler
from octavo.runtime.worker.cuda_graphs import CUDAGraphs
from octavo.runtime.worker.kv_tensors import KVTensors
from octavo.runtime.worker.model_runner import ModelRunner
from octavo.runtime.worker.request_state import RequestState
from tests.fakes import fake_config

STEPS, BLOCK, PROMPT, VOCAB = 64, 64, 32, 49152
GROUPS = [KVCacheGroup(HeadsKV(1, 8, "float32", 64), (0,))]


class RandomExecutor(Executor):
    """Random ids, as lists that were made before."""

    def start(self, config):
        self._sampled, self._missing, self._given = {}, {}, []
        return ModelReady(groups=GROUPS, available_bytes=1 << 40)

    def allocate(self, plan):
        """Nothing to allocate."""

    def execute(self, step):
        self._given.append(step)
        for request_id in step.released_ids:
            del self._missing[request_id]
        self._missing.update((new.request_id, len(new.token_ids)) for new in step.new_requests)
        if step.new_requests or len(self._missing) != len(step.request_ids):
            ends = zip(step.request_ids, step.num_computed_tokens, step.num_scheduled_tokens, strict=True)
            sampled = [[7] if start + n >= self._missing[i] else [] for i, start, n in ends]
        else:
            sampled = self._tokens(len(step.request_ids))[step.step_id % STEPS]
        future = Future()
        future.set_result(ModelRunnerOutput(step.step_id, sampled))
        return future

    def sample(self, masks):
        """Nothing to choose."""

    def take(self):
        """The steps given since the last call."""
        given, self._given = self._given, []
        return given

    def call(self, verb, arguments):
        return [None]

    def close(self):
        """Nothing to close."""

    def _tokens(self, count):
        if count not in self._sampled:
            draw = random.Random(0).randrange
            self._sampled[count] = [[[draw(VOCAB)] for _ in range(count)] for _ in range(STEPS)]
        return self._sampled[count]


class NoModel(Model):
    """Hidden states and logits of zeros."""

    weight_bytes = 1

    def forward(self, batch):
        return torch.zeros(len(batch.positions if batch.wanted is None else batch.wanted), 8)

    def logits(self, hidden):
        return torch.zeros(len(hidden), 64)


class Clock:
    """CPU time of the calling thread by part and round; one part may be profiled instead."""

    def __init__(self, profiled):
        self.rounds = [defaultdict(float)]
        self.profile = cProfile.Profile()
        self._profiled = profiled

    def reset(self):
        """Forget what the beginning took."""
        self.rounds.clear()
        self.profile.clear()

    @contextmanager
    def part(self, name):
        began = time.thread_time_ns()
        with self.profile if name == self._profiled else nullcontext():
            yield
        self.rounds[-1][name] += (time.thread_time_ns() - began) / 1e6 / STEPS

    def timed(self, name, function):
        def call(*args):
            with self.part(name):
                return function(*args)

        return call

    def show(self, count):
        """The best rounds; the last one has only begun."""
        for name in self.rounds[0]:
            print_row(name, count, min(done[name] for done in self.rounds[:-1]))
        if self._profiled:
            pstats.Stats(self.profile, stream=sys.stderr).sort_stats("tottime").print_stats(25)


def print_row(name, count, ms):
    print(json.dumps({"part": name, "requests": count, "ms_per_step": round(ms, 3)}), flush=True)


def make_config(count, num_tokens, path):
    config = fake_config(
        block_size=BLOCK,
        num_blocks=count * (num_tokens // BLOCK + 2),
        max_model_len=num_tokens + PROMPT,
        max_num_seqs=count,
        max_num_batched_tokens=max(8192, count * PROMPT),
        steps_in_flight=2,
    )
    checkpoint = replace(config.checkpoint, path=str(path), config={"vocab_size": VOCAB})
    executor = replace(config.parallel, distributed_executor_backend="benchmarks.host:RandomExecutor")
    return replace(config, checkpoint=checkpoint, parallel=executor)


def make_params(num_tokens, kind=RequestOutputKind.FINAL_ONLY, **options):
    return SamplingParams(
        temperature=0.0, max_tokens=num_tokens, ignore_eos=True, output_kind=kind, **options
    )


def make_prompts(count):
    draw = random.Random(1).randrange
    return [TokensPrompt(prompt_token_ids=[draw(VOCAB) for _ in range(PROMPT)]) for _ in range(count)]


def prepare(config, tokenizer, params):
    """Requests, with ids that are the same each time."""
    processor = InputProcessor(config, tokenizer)
    prepared = [processor.process(prompt, params) for prompt in make_prompts(config.scheduler.max_num_seqs)]
    for number, request in enumerate(prepared):
        request.engine_requests[0].request_id = f"{number:032x}"
    return prepared


def make_runner(config, plan):
    count, device = config.scheduler.max_num_seqs, torch.device("cpu")
    cache = KVTensors(plan, device)
    state = RequestState(count, config.model.max_model_len, plan, device)
    sampler = Sampler(64, count, device, TORCH_SAMPLING)
    runner = ModelRunner(cache, state, TokenHead(sampler, state), [])
    runner.equip(CUDAGraphs(NoModel(), cache, state, sampler, STEP_KERNELS, lambda compute: lambda: None))
    return runner


async def measure_parts(count, num_rounds, path, profiled):
    """Everything in this process and thread: what one step brings goes through all parts."""
    num_tokens = (num_rounds + 1) * STEPS
    config, tokenizer = make_config(count, num_tokens, path), load_tokenizer(path)
    executor, clock = RandomExecutor(), Clock(profiled)
    core = EngineCore(config, executor)
    plan = core.start()
    for request in prepare(config, tokenizer, make_params(num_tokens)):
        core.add(request.engine_requests[0])
    scheduler, runner = core.scheduler, make_runner(config, plan)
    fronts, readers = make_fronts(config, tokenizer, num_tokens)
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(EngineOutputs)
    for number in range(1 + num_rounds * STEPS):
        with clock.part("core"):
            outputs = core.step()
        for step in executor.take():
            with clock.part("runner"):
                runner.execute(step).read()
        with clock.part("encode"):
            frame = encoder.encode(outputs)
        with clock.part("decode"):
            outputs = decoder.decode(frame)
        for name, front in fronts.items():
            with clock.part(name):
                front.process(outputs)
        with clock.part("read"):
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        if number == 0:
            scheduler.schedule = clock.timed("schedule", scheduler.schedule)
            scheduler.update = clock.timed("update", scheduler.update)
            clock.reset()
        if number % STEPS == 0:
            clock.rounds.append(defaultdict(float))
    for reader in readers:
        reader.cancel()
    clock.show(count)


def make_fronts(config, tokenizer, num_tokens):
    """Four fronts that hold the same requests; and the readers of the last one's streams."""
    kinds = {
        "front, ids": make_params(num_tokens, detokenize=False),
        "front, final text": make_params(num_tokens),
        "front, whole text": make_params(num_tokens, RequestOutputKind.CUMULATIVE),
        "front, deltas": make_params(num_tokens, RequestOutputKind.DELTA),
    }
    readers, fronts = [], {}
    for name, params in kinds.items():
        front = fronts[name] = OutputProcessor(tokenizer)
        for request in prepare(config, tokenizer, params):
            stream = OutputStream(is_delta=True)
            front.add(request, stream.put if name == "front, deltas" else None)
            readers.append(asyncio.create_task(read(stream)))
    return fronts, readers


async def read(stream):
    while True:
        await stream.get()


async def measure_processes(count, num_rounds, path):
    """AsyncLLM: by difference of a long run and a short one."""
    config = make_config(count, num_rounds * STEPS, path)
    llm = AsyncLLM(config)
    await llm.start()
    processes = [psutil.Process(), psutil.Process().children()[0]]
    used = []
    for num_tokens in (8, STEPS, num_rounds * STEPS):
        before = [sum(process.cpu_times()[:2]) for process in processes]
        await asyncio.gather(*(generate(llm, prompt, num_tokens) for prompt in make_prompts(count)))
        after = [sum(process.cpu_times()[:2]) for process in processes]
        used.append([1000 * (b - a) for a, b in zip(before, after, strict=True)])
    await llm.shutdown()
    for name, short, long in zip(("front", "core"), *used[1:], strict=True):
        print_row(f"processes, {name}", count, (long - short) / ((num_rounds - 1) * STEPS))


async def generate(llm, prompt, num_tokens):
    async for _ in llm.generate(prompt, make_params(num_tokens, RequestOutputKind.DELTA)):
        pass


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", default="256,1024", help="how many run at once, by commas")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--profile", default="", help="a part to be profiled instead of timed")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error("--rounds must be 2 or more: what a process takes is the difference of two runs")
    path = locate(DEFAULT_MODEL)
    for count in map(int, args.requests.split(",")):
        asyncio.run(measure_parts(count, args.rounds, path, args.profile))
        if not args.profile:
            asyncio.run(measure_processes(count, args.rounds, path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
