"""A server of replicas, ranks that torchrun starts, and ranks that are killed under load: on several GPUs.

    python benchmarks/record.py gpu-ranks python -m benchmarks.gpu_ranks [--gpus N] [--rows served,…]

served:   tokens per second of `octavo serve` with one replica of an 8B shape and with one per GPU, over HTTP
launched: a small model in float32 by torchrun, all ranks of which give the tokens of one GPU
killed:   ranks and replicas that share experts die by kill -9 under load; every answer is that of one GPU;
          seconds from a death until all that was under way and one more request are done
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.gpu_parallel import (
    CONFIGS,
    MULTICAST_OFF,
    SMALL,
    SMALL_EXPERTS,
    engine,
    generate,
    write_small,
)
from benchmarks.gpu_running import served

_CLIENTS = 16
_REQUESTS = 1024
"""Of each replica: by chance the busiest of four has 2.5 % more to do than the mean; of 256 it had 5 %."""
_GIVEN: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 600, "max_model_len": 512}
_PROMPTS = [[7 * i + j for j in range(5 + 9 * i)] for i in range(12)]
_LAUNCHED = """
import json, sys
import torch.distributed as dist
from benchmarks.gpu_ranks import _GIVEN, _PROMPTS
from benchmarks.gpu_parallel import engine, generate
options = {"tensor_parallel_size": int(sys.argv[2]), "distributed_executor_backend": "external_launcher"}
with engine(sys.argv[1], **_GIVEN, **options) as llm:
    found = generate(llm, _PROMPTS, [40] * len(_PROMPTS))
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    if dist.get_rank() == 0:
        print(json.dumps(every))
"""


def tell(row: str, **figures: Any) -> None:
    print(json.dumps({"row": row, **figures}), flush=True)


def serve_replicas(folder: Path, num_gpus: int) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIGS["8b"]))
    for count in (1, num_gpus):
        options = ["--load-format", "dummy", "--skip-tokenizer-init", "--max-model-len", "4096"]
        with served(str(folder), *options, "--data-parallel-size", str(count)) as url:
            walls, out = _load(url, str(folder), _REQUESTS * count)
        tell(
            "served",
            replicas=count,
            requests=_REQUESTS * count,
            out_tok=out,
            walls=walls,
            out_tok_s=round(out / min(walls)),
        )


def _load(url: str, model: str, count: int) -> tuple[list[float], int]:
    """Seconds of the second run, and how many tokens it has: the lengths of `gpu_parallel.mixed`."""
    rng = random.Random(1)

    def length(most: int) -> int:
        return max(4, min(most, int(rng.lognormvariate(5.0, 1.0))))

    lengths, walls = [(length(1024), length(512)) for _ in range(count)], []
    with multiprocessing.get_context("spawn").Pool(_CLIENTS) as clients:
        for _ in range(2):
            bodies = [
                {
                    "model": model,
                    "prompt": [rng.randrange(100_000) for _ in range(own)],
                    "max_tokens": most,
                    "temperature": 0,
                    "ignore_eos": True,
                    "return_token_ids": True,
                }
                for own, most in lengths
            ]
            parts = [(url, bodies[client::_CLIENTS]) for client in range(_CLIENTS)]
            began = time.perf_counter()
            out = sum(clients.starmap(_ask_all, parts, chunksize=1))
            walls.append(round(time.perf_counter() - began, 3))
            assert out == sum(most for _, most in lengths)
    return walls[1:], out


def _ask_all(url: str, bodies: list[dict[str, Any]]) -> int:
    """Ask all at once, in a process of its own, as one client is slower than a GPU; how many tokens came."""

    async def ask() -> int:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(timeout=None, limits=limits) as client:
            answers = await asyncio.gather(*(client.post(f"{url}/v1/completions", json=b) for b in bodies))
        return sum(len(a.raise_for_status().json()["choices"][0]["token_ids"]) for a in answers)

    return asyncio.run(ask())


def launch(folder: Path, num_gpus: int) -> None:
    write_small(folder, SMALL)
    with engine(folder, **_GIVEN) as llm:
        one = generate(llm, _PROMPTS, [40] * len(_PROMPTS))
    script = folder / "launched.py"
    script.write_text(_LAUNCHED)
    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_gpus}", str(script)]
    began = time.perf_counter()
    printed = subprocess.run(
        [sys.executable, *words, str(folder), str(num_gpus)], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    every = json.loads(printed.splitlines()[-1])
    equal = sum(a == b for found in every for a, b in zip(found, one, strict=True))
    seconds = round(time.perf_counter() - began, 1)
    tell("launched", ranks=len(every), equal=equal, of=len(one) * len(every), seconds=seconds)


def kill(folder: Path, num_gpus: int, times: int = 3) -> None:
    for config, options in (
        (SMALL, {"tensor_parallel_size": num_gpus}),
        (SMALL_EXPERTS, {"data_parallel_size": num_gpus, "enable_expert_parallel": True}),
    ):
        write_small(folder, config)
        with engine(folder, **_GIVEN) as llm:
            one = generate(llm, _PROMPTS, [200] * len(_PROMPTS))
        asyncio.run(_kill(folder, options, one, times))


async def _kill(folder: Path, options: dict[str, Any], one: list[list[int]], times: int) -> None:
    from octavo import AsyncLLM, EngineArgs, SamplingParams, TokensPrompt
    from octavo.config.resolve import resolve

    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, detokenize=False)
    config = resolve(EngineArgs(model=str(folder), skip_tokenizer_init=True, **_GIVEN, **options))
    llm, equal, asked, back_s = AsyncLLM(config, on_crash="replay"), 0, 0, []
    await llm.start()

    async def ask(number: int) -> bool:
        prompt = TokensPrompt(prompt_token_ids=_PROMPTS[number])
        outputs = [output async for output in llm.generate(prompt, params)]
        return list(outputs[-1].outputs[0].token_ids) == one[number]

    for _ in range(times):
        under_way = [asyncio.create_task(ask(number)) for number in range(len(_PROMPTS))]
        await asyncio.sleep(random.uniform(0.05, 0.3))
        children = psutil.Process().children(recursive=True)
        ranks = [child for child in children if "octavo.runtime.worker.main" in child.cmdline()]
        os.kill(random.choice(ranks).pid, signal.SIGKILL)
        began = time.perf_counter()
        equal += sum(await asyncio.wait_for(asyncio.gather(*under_way, ask(0)), 60))
        asked, taken = asked + len(under_way) + 1, time.perf_counter() - began
        back_s.append(round(taken, 2))
        assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)
        await asyncio.sleep(1)
    await llm.shutdown()
    tell(
        "killed",
        sizes=str(options),
        times=times,
        equal=equal,
        of=asked,
        done_s=back_s,
        median_s=statistics.median(back_s),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--rows", default="launched,killed,served")
    args = parser.parse_args()
    os.environ.update(MULTICAST_OFF)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    rows = {"served": serve_replicas, "launched": launch, "killed": kill}
    for row in args.rows.split(","):
        with tempfile.TemporaryDirectory() as folder:
            rows[row](Path(folder), args.gpus)


if __name__ == "__main__":
    main()
