"""A wide small recurrent model beside transformers' own code: `python benchmarks/cpu_recurrent.py`.

Four layers of the width of Qwen 3.5 2B, three of them gated delta nets; random weights in bf16. One JSON line
per batch: tokens per second of prefill and of decoding, by the engine and by transformers.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cpu_experts import PROMPT, STEPS, THREADS, seconds
from octavo import LLM, SamplingParams

SIZE, VOCAB = 2048, 32768
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


def engine_rates(folder: str, batch: int) -> dict[str, float]:
    """Tokens per second. Decoding: what more steps cost, so prefill counts for nothing."""
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16"}
    llm = LLM(folder, **options, max_model_len=1024, cpu_threads=THREADS, enable_prefix_caching=False)

    def run(count: int, length: int, steps: int) -> None:
        prompts = torch.randint(VOCAB, (count, length)).tolist()
        params = SamplingParams(max_tokens=steps, temperature=0.0, ignore_eos=True, detokenize=False)
        llm.generate(prompts, params, use_tqdm=False)

    run(batch, 8, 4)
    decode = seconds(lambda: run(batch, 8, STEPS + 1)) - seconds(lambda: run(batch, 8, 1))
    prefill = seconds(lambda: run(1, PROMPT, 1))
    llm.shutdown()
    return {"decode": batch * STEPS / decode, "prefill": PROMPT / prefill}


@torch.inference_mode()
def transformers_rates(batch: int) -> dict[str, float]:
    """The same by transformers, in bf16."""
    torch.set_num_threads(THREADS)
    rest = {key: value for key, value in CONFIG.items() if key not in ("architectures", "model_type")}
    config = AutoConfig.for_model(CONFIG["model_type"], **rest)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    ids, prompt = torch.randint(VOCAB, (batch, 8)), torch.randint(VOCAB, (1, PROMPT))
    state = model(ids, use_cache=True).past_key_values
    decode = seconds(lambda: model(ids[:, :1], past_key_values=state, use_cache=True))
    prefill = seconds(lambda: model(prompt, logits_to_keep=1))
    return {"decode": batch / decode, "prefill": PROMPT / prefill}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        for batch in parser.parse_args().batches:
            row: dict[str, float] = {"batch": batch}
            for name, rates in (
                ("octavo", engine_rates(folder, batch)),
                ("transformers", transformers_rates(batch)),
            ):
                row |= {f"{name} {kind} tokens/s": round(value, 1) for kind, value in rates.items()}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
