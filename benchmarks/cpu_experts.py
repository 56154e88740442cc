"""A wide small model with experts beside transformers' own code: `python benchmarks/cpu_experts.py`.

Two layers of Qwen3-30B-A3B's width, but 64 experts, 8 per token, of size 768; random weights in bf16. One
JSON line each: tokens per second of prefill and of decoding, by the engine and by transformers, and the floor
of decoding, the bytes that a step must read by the bandwidth measured first.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from octavo import LLM, SamplingParams

LAYERS, EXPERTS, TOP_K, INNER, SIZE, VOCAB = 2, 64, 8, 768, 2048, 32768
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": VOCAB,
    "hidden_size": SIZE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "moe_intermediate_size": INNER,
    "intermediate_size": INNER,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
}
PROMPT, STEPS = 512, 16
THREADS = 2


def seconds(work: Callable[[], object]) -> float:
    """The best of three."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def read_rate() -> float:
    """Gigabytes per second that the threads read."""
    data = torch.ones(1 << 27, dtype=torch.float32)
    return data.nbytes / seconds(data.sum) / 1e9


def step_bytes(batch: int) -> float:
    """Bytes of weights that a step reads; of experts, how many different ones random tokens take."""
    taken = EXPERTS * (1 - (1 - TOP_K / EXPERTS) ** batch)
    attention = SIZE * 128 * (2 * 32 + 2 * 4)
    return 2 * (LAYERS * (taken * 3 * SIZE * INNER + attention + SIZE * EXPERTS) + VOCAB * SIZE)


def engine_rates(folder: str, batch: int) -> dict[str, float]:
    """Tokens per second. Decoding: what more steps cost, so prefill counts for nothing."""
    options = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": 1024,
    }
    llm = LLM(
        folder, **options, cpu_threads=THREADS, enable_prefix_caching=False, num_gpu_blocks_override=4096
    )
    generator = torch.Generator().manual_seed(0)

    def run(count: int, length: int, steps: int) -> None:
        prompts = torch.randint(VOCAB, (count, length), generator=generator).tolist()
        params = SamplingParams(max_tokens=steps, temperature=0.0, ignore_eos=True, detokenize=False)
        llm.generate(prompts, params, use_tqdm=False)

    run(batch, 8, 4)
    decode = seconds(lambda: run(batch, 8, STEPS + 1)) - seconds(lambda: run(batch, 8, 1))
    prefill = seconds(lambda: run(1, PROMPT, 1))
    llm.shutdown()
    return {"decode": batch * STEPS / decode, "prefill": PROMPT / prefill}


@torch.inference_mode()
def transformers_rates(values: dict[str, Any], batch: int) -> dict[str, float]:
    """The same by transformers, in bf16. values: of config.json"""
    torch.set_num_threads(THREADS)
    rest = {key: value for key, value in values.items() if key not in ("architectures", "model_type")}
    config = AutoConfig.for_model(values["model_type"], **rest)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    ids = torch.randint(VOCAB, (batch, 8))
    state = model(ids, use_cache=True).past_key_values

    def decode() -> None:
        for _ in range(STEPS // 4):
            model(ids[:, :1], past_key_values=state, use_cache=True)

    prompt = torch.randint(VOCAB, (1, PROMPT))
    return {
        "decode": batch * (STEPS // 4) / seconds(decode),
        "prefill": PROMPT / seconds(lambda: model(prompt, logits_to_keep=1)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    rate = read_rate()
    print(json.dumps({"read GB/s": round(rate, 1)}), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        for batch in parser.parse_args().batches:
            ours, theirs = engine_rates(folder, batch), transformers_rates(CONFIG, batch)
            floor = batch * rate * 1e9 / step_bytes(batch)
            row = {"batch": batch, "decode floor tokens/s": floor}
            for name, rates in (("octavo", ours), ("transformers", theirs)):
                row |= {f"{name} {kind} tokens/s": value for kind, value in rates.items()}
            print(json.dumps({key: round(value, 1) for key, value in row.items()}), flush=True)


if __name__ == "__main__":
    main()
