"""What adapters cost on a GPU: an 8B decodes with and without them, on a plain engine and on one with LoRA.

    python benchmarks/record.py gpu-lora python -m benchmarks.gpu_lora

Llama-3.1-8B's shape with dummy weights; adapters of rank 16 on all linear layers, which share one file of
weights and differ by their scale. Prints a JSON line per batch: milliseconds per step, the medians of runs in
turn, and the cost beside the plain engine. Checked in the same run: lengths; that the same prompt and adapter
give the same tokens, and others than the base; that rows of the base on the engine with LoRA give the plain
engine's tokens.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.gpu import CONFIGS, random_prompts
from octavo import LLM, SamplingParams
from octavo.lora.request import LoRARequest

SHAPE, RANK = CONFIGS["llama-3.1-8b"], 16
MODULES = {
    "self_attn.q_proj": (4096, 4096),
    "self_attn.k_proj": (1024, 4096),
    "self_attn.v_proj": (1024, 4096),
    "self_attn.o_proj": (4096, 4096),
    "mlp.gate_proj": (14336, 4096),
    "mlp.up_proj": (14336, 4096),
    "mlp.down_proj": (4096, 14336),
}
PROMPT, SHORT, LONG = 128, 32, 160
Rows = Sequence[LoRARequest | None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", default="1:1,64:16,256:64", help="requests:adapters")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    batches = [tuple(map(int, pair.split(":"))) for pair in args.batches.split(",")]
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        path = Path(folder)
        (path / "config.json").write_text(json.dumps(SHAPE))
        loras = write_adapters(path, max(adapters for _, adapters in batches))
        plain: dict[int, tuple[float, list[list[int]]]] = {}
        with engine(path) as llm:
            for size, _ in batches:
                plain[size] = measure(llm, size, [[None] * size], args.repeats)[0]
        options: dict[str, Any] = {"enable_lora": True, "max_loras": len(loras), "max_lora_rank": RANK}
        with engine(path, **options) as llm:
            began = time.perf_counter()
            for lora in loras:
                llm.llm_engine.add_lora(lora)
            print(json.dumps({"row": "load", "adapters": len(loras), "s": time.perf_counter() - began}))
            for size, adapters in batches:
                own: Rows = [loras[i % adapters] for i in range(size)]
                base, changed = measure(llm, size, [[None] * size, own], args.repeats)
                shares = check(plain[size][1], base[1], changed[1], own)
                row = {"row": "decode", "batch": size, "adapters": adapters, "plain_ms": plain[size][0]}
                row |= {"base_ms": base[0], "lora_ms": changed[0]}
                row |= {
                    "base_cost": base[0] / plain[size][0] - 1,
                    "lora_cost": changed[0] / plain[size][0] - 1,
                }
                print(json.dumps(row | shares), flush=True)


def engine(folder: Path, **options: Any) -> LLM:
    given = {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16", "max_model_len": 1024}
    return LLM(str(folder), max_num_seqs=256, gpu_memory_utilization=0.85, **given, **options)


def write_adapters(folder: Path, count: int) -> list[LoRARequest]:
    """One file of weights, of the base's size; other scales."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(SHAPE["num_hidden_layers"]):
        for name, (outputs, inputs) in MODULES.items():
            for end, size in ("A", (RANK, inputs)), ("B", (outputs, RANK)):
                value = torch.randn(size, generator=generator)  # dummy weights are near 0
                tensors[f"base_model.model.model.layers.{layer}.{name}.lora_{end}.weight"] = value.bfloat16()
    save_file(tensors, folder / "weights.safetensors")
    requests = []
    for number in range(1, count + 1):
        own = folder / f"adapter{number}"
        own.mkdir()
        os.link(folder / "weights.safetensors", own / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8 + number}
        config["target_modules"] = [name.rpartition(".")[2] for name in MODULES]
        (own / "adapter_config.json").write_text(json.dumps(config))
        requests.append(LoRARequest(own.name, number, str(own)))
    return requests


def generate(llm: LLM, loras: Rows, length: int) -> tuple[float, list[list[int]]]:
    """Seconds, and tokens: everybody has the first one's prompt."""
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
    prompts = [random_prompts(random.Random(0), [PROMPT])[0]] * len(loras)
    llm.reset_prefix_cache()
    began = time.perf_counter()
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        params,
        lora_request=None if loras[0] is None else list(loras),
        use_tqdm=False,
    )
    seconds = time.perf_counter() - began
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    assert all(len(row) == length for row in tokens), "lengths"
    return seconds, tokens


def measure(llm: LLM, size: int, kinds: list[Rows], repeats: int) -> list[tuple[float, list[list[int]]]]:
    """Of each kind: milliseconds of a decoding step, and what was said."""
    found: list[list[float]] = [[] for _ in kinds]
    said: list[list[list[int]]] = [[] for _ in kinds]
    for turn in range(repeats + 1):  # the first loads, compiles and captures
        for index, loras in enumerate(kinds):
            short, _ = generate(llm, loras, SHORT)
            long, said[index] = generate(llm, loras, LONG)
            if turn:
                found[index].append(1000 * (long - short) / (LONG - SHORT))
    return [(statistics.median(times), tokens) for times, tokens in zip(found, said, strict=True)]


def check(
    plain: list[list[int]], base: list[list[int]], changed: list[list[int]], own: Rows
) -> dict[str, float]:
    """Return which share of rows says what it should; near-ties in bfloat16 may part a few."""
    firsts: dict[str, list[int]] = {}
    for lora, tokens in zip(own, changed, strict=True):
        assert lora is not None
        firsts.setdefault(lora.lora_name, tokens)
    same = [firsts[lora.lora_name][:8] == row[:8] for lora, row in zip(own, changed, strict=True) if lora]
    found = {
        "base_rows_as_plain": statistics.mean(a[:8] == b[:8] for a, b in zip(plain, base, strict=True)),
        "rows_of_one_adapter_alike": statistics.mean(same),
        "rows_changed": statistics.mean(a != b for a, b in zip(changed, base, strict=True)),
        "answers_per_adapter": len({str(tokens) for tokens in firsts.values()}) / len(firsts),
    }
    assert min(list(found.values())[:3]) > 0.8, found
    return found


if __name__ == "__main__":
    main()
