"""Mixtures of experts of usual sizes on one GPU: steps of decoding, and prompts. Dummy weights in bfloat16.

python -m benchmarks.gpu_mixtures [--models 30b-a3b,v2-lite] [--quantization fp8_per_channel]

One JSON line per row; the length of every output is checked. The floor is the matrices that a step reads,
those of as many experts as so many tokens choose on average, at 3.35 TB/s (an H100; an H200 has 4.8).
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_parallel import CONFIGS, decode, engine, generate, random_prompts

MODELS: dict[str, dict[str, Any]] = {
    "30b-a3b": CONFIGS["30b-a3b"],
    "v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "norm_topk_prob": False,
        "topk_method": "greedy",
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_hidden_layers": 27,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 102400,
    },
}
MODELS["gpt-oss-20b"] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
    "attention_bias": True,
    "hidden_act": "silu",
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 201088,
    "quantization_config": {"quant_method": "mxfp4"},
}
TERABYTES = 3.35


def floor_ms(name: str, batch: int) -> float:
    """Milliseconds for the matrices of a decoding step."""
    config = MODELS[name]
    size, layers, top_k = config["hidden_size"], config["num_hidden_layers"], config["num_experts_per_tok"]
    names = "num_experts", "n_routed_experts", "num_local_experts"
    count = next(config[key] for key in names if key in config)
    expert = 3 * size * config.get("moe_intermediate_size", size)
    if "quantization_config" in config:  # MXFP4: 17 bytes for 32 numbers
        expert *= 17 / 64
    chosen = count * (1 - (1 - top_k / count) ** batch)
    heads, head_dim = config["num_attention_heads"], config.get("head_dim", 192)
    attention = 2 * size * heads * head_dim + 2 * size * config["num_key_value_heads"] * head_dim
    if "kv_lora_rank" in config:
        attention = size * heads * 192 + size * 576 + heads * 512 * 256 + heads * 128 * size
    shared = config.get("n_shared_experts", 0)
    numbers = layers * ((chosen + shared) * expert + attention) + size * config["vocab_size"]
    return 2 * numbers / TERABYTES / 1e9


def prefill(llm: Any, name: str, count: int, length: int) -> None:
    """Prompts, one token out each."""
    took = []
    for repeat in range(3):
        prompts = random_prompts(random.Random(f"{count} {length} {repeat}"), [length] * count)
        began = time.perf_counter()
        generate(llm, prompts, [1] * count)
        took.append(time.perf_counter() - began)
    row = {"row": "prefill", "sizes": name, "prompts": count, "length": length}
    print(json.dumps(row | {"tok_s": round(count * length / sorted(took)[1])}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--quantization", default="", help="how weights are rounded as they are made")
    asked = parser.parse_args()
    for name in asked.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            config = {"bos_token_id": 1, "eos_token_id": 2} | MODELS[name]
            (Path(folder) / "config.json").write_text(json.dumps(config))
            options = {"load_format": "dummy", "dtype": "bfloat16", "max_model_len": 4096}
            options["quantization"] = asked.quantization
            with engine(Path(folder), **options) as llm:
                for batch in asked.batches:
                    decode(llm, name, batch)
                    print(
                        json.dumps(
                            {"sizes": name, "batch": batch, "floor_ms": round(floor_ms(name, batch), 2)}
                        )
                    )
                prefill(llm, name, 8, 2048)


if __name__ == "__main__":
    main()
