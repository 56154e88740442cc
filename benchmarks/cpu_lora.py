"""What adapters cost on a CPU: the default model decodes with and without them.

    python benchmarks/record.py cpu-lora python -m benchmarks.cpu_lora

Adapters of rank 16 on all linear layers, each with weights of its own. Prints a JSON line per batch:
milliseconds per step, medians of runs in turn on a plain engine and on one with LoRA, and the cost beside the
plain one. Checked in the same run: lengths; rows of the base on the engine with LoRA say what the plain one
does; each row with an adapter says what it says alone, and not what the base does.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from octavo import LLM, SamplingParams
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
    costs = {f"{kind}_cost": found[kind] / found["plain"] - 1 for kind in ("base", "lora")}
    return {f"{kind}_ms": value for kind, value in found.items()} | costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", default="1:1,16:1,16:8", help="requests:adapters")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    batches = [tuple(map(int, pair.split(":"))) for pair in args.batches.split(",")]
    with tempfile.TemporaryDirectory() as folder, LLM(max_model_len=512) as plain:
        loras = write_adapters(Path(folder), max(adapters for _, adapters in batches))
        with LLM(max_model_len=512, enable_lora=True) as adapted:
            for size, adapters in batches:
                own = [loras[i % adapters] for i in range(size)]
                row = {"row": "decode", "batch": size, "adapters": adapters}
                print(json.dumps(row | measure(plain, adapted, own, args.repeats)), flush=True)


if __name__ == "__main__":
    main()
