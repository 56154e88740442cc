"""A wide small recurrent model beside transformers' own code: `python benchmarks/cpu_recurrent.py`.

Four layers of the width of Qwen 3.5 2B, three of them gated delta nets; random weights in bf16. One JSON line
per batch: tokens per second of prefill and of decoding, by the engine and by transformers.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cpu_experts import SIZE, VOCAB, engine_rates, transformers_rates

CONFIG = {
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
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        for batch in parser.parse_args().batches:
            row: dict[str, float] = {"batch": batch}
            for name, rates in (
                ("octavo", engine_rates(folder, batch)),
                ("transformers", transformers_rates(CONFIG, batch)),
            ):
                row |= {f"{name} {kind} tokens/s": round(value, 1) for kind, value in rates.items()}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
