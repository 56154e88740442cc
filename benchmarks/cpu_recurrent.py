"""Recurrent models beside transformers' own code: `python benchmarks/cpu_recurrent.py [--models …]`.

"qwen3.5": four layers of the width of Qwen 3.5 2B, three of them gated delta nets. "granite-4.0-h-350m": a
quarter of that model's layers, seven of Mamba-2 and one of attention: a prompt takes transformers seconds per
layer. Random weights in bf16. One JSON line per model and batch: tokens per second of prefill (512 tokens)
and of decoding, by the engine and by transformers, in turn.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cpu_experts import SIZE, VOCAB, engine_rates, transformers_rates

MODELS: dict[str, dict[str, Any]] = {
    "qwen3.5": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": VOCAB,
        "hidden_size": SIZE,
        "intermediate_size": 6144,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
    "granite-4.0-h-350m": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "vocab_size": 100352,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "shared_intermediate_size": 2048,
        "num_hidden_layers": 8,
        "layer_types": ["mamba"] * 5 + ["attention"] + ["mamba"] * 2,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "mamba_n_heads": 48,
        "mamba_d_head": 32,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_expand": 2,
        "position_embedding_type": "nope",
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    asked = parser.parse_args()
    for model in asked.models:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(MODELS[model]))
            for batch in asked.batches:
                row: dict[str, float | str] = {"model": model, "batch": batch}
                for name, rates in (
                    ("octavo", engine_rates(folder, batch)),
                    ("transformers", transformers_rates(MODELS[model], batch)),
                ):
                    row |= {f"{name} {kind} tokens/s": round(value, 1) for kind, value in rates.items()}
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
