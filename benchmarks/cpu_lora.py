"""What adapters cost on a CPU: the default model decodes with and without them.

    python benchmarks/record.py cpu-lora python -m benchmarks.cpu_lora [--first-tokens]

Adapters of rank 16 on all linear layers, each with weights of its own. Prints a JSON line per batch:
milliseconds per step, medians of runs in turn on a plain engine and on one with LoRA, and what it costs, the
median of the turns' costs. `cost_in_turn` is that beside the same engine without adapters, for two engines
lie in memory differently. Checked in the same run: lengths; rows of the base on the engine with LoRA say what
the plain one does; each row with an adapter says what it says alone, and not what the base does.

With --first-tokens: lines of 8 and 16 adapters on 8 slots, in turn: milliseconds to the first token (p50) of
requests that 8 or 16 clients send one after the other, each with an adapter drawn at random. All adapters are
in host memory.
"""

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from octavo import LLM, AsyncLLM, EngineArgs, RequestOutputKind, SamplingParams
from octavo.lora.request import LoRARequest

LAYERS, RANK = 30, 16
MODULES = {
    "self_attn.q_proj": (576, 576),
    "self_attn.k_proj": (192, 576),
    "self_attn.v_proj": (192, 576),
    "self_attn.o_proj": (576, 576),
    "mlp.gate_proj": (1536, 576),
    "mlp.up_proj": (1536, 576),
    "mlp.down_proj": (576, 1536),
}
PROMPT, SHORT, LONG = "Once upon a time there was a small village by the sea, and", 16, 80
SLOTS, REQUESTS, ANSWER = 8, 8, 16
Tokens = list[list[int]]


def write_adapters(folder: Path, count: int) -> list[LoRARequest]:
    """Write adapters as PEFT would, in float32."""
    requests = []
    for number in range(1, count + 1):
        generator, tensors = torch.Generator().manual_seed(number), {}
        for layer in range(LAYERS):
            for name, (outputs, inputs) in MODULES.items():
                for end, size in ("A", (RANK, inputs)), ("B", (outputs, RANK)):
                    value = 0.05 * torch.randn(size, generator=generator)
                    tensors[f"base_model.model.model.layers.{layer}.{name}.lora_{end}.weight"] = value
        own = folder / f"adapter{number}"
        own.mkdir()
        save_file(tensors, own / "adapter_model.safetensors")
        modules = [name.rpartition(".")[2] for name in MODULES]
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": modules}
        (own / "adapter_config.json").write_text(json.dumps(config))
        requests.append(LoRARequest(own.name, number, str(own)))
    return requests


def generate(llm: LLM, loras: Sequence[LoRARequest | None], length: int) -> tuple[float, Tokens]:
    """Return seconds, and tokens: everybody has the first one's prompt."""
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
    llm.reset_prefix_cache()
    began = time.perf_counter()
    given = None if loras[0] is None else list(loras)
    outputs = llm.generate([PROMPT] * len(loras), params, lora_request=given, use_tqdm=False)
    seconds = time.perf_counter() - began
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    assert all(len(row) == length for row in tokens), "lengths"
    return seconds, tokens


def measure(plain: LLM, adapted: LLM, own: list[LoRARequest], repeats: int) -> dict[str, float]:
    """Return milliseconds of a decoding step, and costs; the first turn loads and records."""
    none: list[LoRARequest | None] = [None] * len(own)
    kinds = {"plain": (plain, none), "base": (adapted, none), "lora": (adapted, own)}
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    said: dict[str, Tokens] = {}
    for turn in range(repeats + 1):
        for kind, (llm, loras) in kinds.items():
            short, _ = generate(llm, loras, SHORT)
            long, said[kind] = generate(llm, loras, LONG)
            if turn:
                times[kind].append(1000 * (long - short) / (LONG - SHORT))
    assert said["base"] == said["plain"], "rows of the base"
    for lora, tokens in zip(own, said["lora"], strict=True):
        assert generate(adapted, [lora], LONG)[1] == [tokens], "a row with an adapter beside the row alone"
        assert tokens != said["plain"][0], "a row with an adapter says what the base does"
    found = {kind: statistics.median(each) for kind, each in times.items()}

    def cost(kind: str, beside: str) -> float:
        return statistics.median(a / b for a, b in zip(times[kind], times[beside], strict=True)) - 1

    costs = {f"{kind}_cost": cost(kind, "plain") for kind in ("base", "lora")}
    costs["cost_in_turn"] = cost("lora", "base")
    return {f"{kind}_ms": value for kind, value in found.items()} | costs


async def first_tokens(llm: AsyncLLM, loras: Sequence[LoRARequest], clients: int, seed: int) -> list[float]:
    """Return seconds to the first token of all requests; each has a prompt of its own."""
    params = SamplingParams(
        temperature=0, max_tokens=ANSWER, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    drawn, waited = random.Random(seed), []

    async def client(number: int) -> None:
        for turn in range(REQUESTS):
            name, began, lengths = f"{seed}-{number}-{turn}", time.perf_counter(), []
            lora = drawn.choice(loras)
            async for output in llm.generate(f"{name}: {PROMPT}", params, name, lora_request=lora):
                if not lengths:
                    waited.append(time.perf_counter() - began)
                lengths.append(len(output.outputs[0].token_ids))
            assert sum(lengths) == ANSWER, "lengths"

    await asyncio.gather(*map(client, range(clients)))
    return waited


async def measure_slots(loras: list[LoRARequest], repeats: int) -> list[dict[str, float]]:
    """Return rows for half of the adapters and for all; the first turn loads and records."""
    options = {"max_model_len": 512, "enable_lora": True, "max_loras": SLOTS, "max_cpu_loras": len(loras)}
    llm = AsyncLLM.from_engine_args(EngineArgs(**options))
    rows = []
    for clients in (SLOTS, 2 * SLOTS):
        waited: dict[int, list[float]] = {SLOTS: [], len(loras): []}
        for turn in range(repeats + 1):
            for count, times in waited.items():
                found = await first_tokens(llm, loras[:count], clients, 100 * turn + count)
                times.extend(found if turn else [])
        least = statistics.median(waited[SLOTS])
        for count, times in waited.items():
            row = {"row": "first token", "clients": clients, "slots": SLOTS, "adapters": count}
            p50 = statistics.median(times)
            rows.append(row | {"p50_ms": 1000 * p50, "ratio": p50 / least})
    llm.shutdown()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", default="1:1,16:1,16:8", help="requests:adapters")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--first-tokens", action="store_true", help="these alone")
    parser.add_argument("--write", metavar="FOLDER", help="only write eight adapters there")
    args = parser.parse_args()
    if args.write:
        write_adapters(Path(args.write), 8)
        return
    batches = [tuple(map(int, pair.split(":"))) for pair in args.batches.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        if args.first_tokens:
            for row in asyncio.run(measure_slots(write_adapters(Path(folder), 2 * SLOTS), args.repeats)):
                print(json.dumps(row), flush=True)
            return
        loras = write_adapters(Path(folder), max(adapters for _, adapters in batches))
        with LLM(max_model_len=512) as plain, LLM(max_model_len=512, enable_lora=True) as adapted:
            for size, adapters in batches:
                own = [loras[i % adapters] for i in range(size)]
                row = {"row": "decode", "batch": size, "adapters": adapters}
                print(json.dumps(row | measure(plain, adapted, own, args.repeats)), flush=True)


if __name__ == "__main__":
    main()
