"""Recurrent models beside transformers' own code, in turn, with the same weights and prompts.

    python benchmarks/record.py cpu-recurrent python benchmarks/cpu_recurrent.py [--models …] [--prompt 256]

"granite-4.0-h-350m" and "falcon-h1-tiny-90m" have the sizes of these models, all layers; "qwen3.5" is four
layers of the width of Qwen 3.5 2B, three of them gated delta nets. Random weights in bf16. One JSON line per
model and batch: milliseconds per step of decoding, the least of the rounds, and what a step takes at least,
as long as reading its weights once at the rate that is measured first; with --prompt, milliseconds of a
prompt, once. Tokens are octavo's: `same_tokens` says for how many transformers, given those before, finds the
same one, `distinct_tokens` how many there are.
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

SIZE, VOCAB, THREADS, STEPS, START = 2048, 32768, 2, 16, 8
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
        "num_hidden_layers": 32,
        "layer_types": [*["mamba"] * 5, "attention", *["mamba"] * 2] * 4,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "mamba_n_heads": 48,
        "mamba_d_head": 32,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_expand": 2,
        "mamba_chunk_size": 32,
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.015625,
        "residual_multiplier": 0.246,
        "logits_scaling": 3.0,
        "position_embedding_type": "nope",
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
    "falcon-h1-tiny-90m": {
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "vocab_size": VOCAB,
        "hidden_size": 512,
        "intermediate_size": 768,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "mamba_d_ssm": 768,
        "mamba_n_heads": 24,
        "mamba_d_head": 32,
        "mamba_d_state": 64,
        "mamba_n_groups": 1,
        "mamba_rms_norm": False,
        "mamba_norm_before_gate": False,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--prompt", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    torch.set_num_threads(THREADS)
    rate = read_rate()
    for name in asked.models:
        with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
            model = make_model(MODELS[name], folder)
            floor = 1000 * step_bytes(model) / (rate * 1e9)
            llm = LLM(
                folder,
                skip_tokenizer_init=True,
                dtype="bfloat16",
                max_model_len=1024,
                cpu_threads=THREADS,
                enable_prefix_caching=False,
                num_gpu_blocks_override=4096,
            )
            for batch in asked.batches:
                row = {"model": name, "batch": batch} | decode(llm, model, batch, asked.rounds)
                row |= {"floor_ms": floor, "read_gb_s": rate}
                print(json.dumps(rounded(row)), flush=True)
            if asked.prompt:
                row = {"model": name, "prompt": asked.prompt} | prefill(llm, model, asked.prompt)
                print(json.dumps(rounded(row)), flush=True)
            llm.shutdown()


def read_rate() -> float:
    """Gigabytes per second that the threads read."""
    data = torch.ones(1 << 27, dtype=torch.float32)
    return data.nbytes / min(timed(data.sum)[0] for _ in range(3)) / 1e9


def make_model(values: dict[str, Any], folder: str) -> Any:
    """Make a model whose greedy tokens are clear, and save it."""
    torch.manual_seed(0)
    rest = {key: value for key, value in values.items() if key not in ("architectures", "model_type")}
    config = AutoConfig.for_model(values["model_type"], **rest)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.0 if "embed" in name else 0.03)
    model.save_pretrained(folder)
    return model


def step_bytes(model: Any) -> int:
    """Bytes of weights that a step reads: all but an embedding that is no head."""
    head = model.get_output_embeddings().weight
    untied = 0 if head is model.get_input_embeddings().weight else head.nbytes
    return sum(parameter.nbytes for parameter in model.parameters()) - untied


def decode(llm: LLM, model: Any, batch: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of a step by both. What more steps cost octavo, so prefill counts for nothing."""
    prompts = torch.randint(VOCAB, (batch, START)).tolist()
    given, seen, ours, theirs = torch.tensor(prompts), [[0]], [], []
    generate(llm, prompts, 2)
    for _ in range(rounds):
        one, _ = timed(lambda: generate(llm, prompts, 1))
        all_steps, seen = timed(lambda: generate(llm, prompts, STEPS + 1))
        ours.append((all_steps - one) / STEPS)
        state = model(given, use_cache=True).past_key_values
        ids = torch.tensor([tokens[:1] for tokens in seen])
        steps = STEPS // 4
        begun = time.perf_counter()
        for _ in range(steps):
            ids = model(ids, past_key_values=state, use_cache=True).logits[:, -1:].argmax(-1)
        theirs.append((time.perf_counter() - begun) / steps)
    written = torch.tensor(seen)
    found = model(torch.cat([given, written[:, :-1]], 1)).logits[:, START - 1 :].argmax(-1)
    same = float((found == written).float().mean())
    return both(min(ours), min(theirs)) | {"same_tokens": same, "distinct_tokens": len(written.unique())}


def prefill(llm: LLM, model: Any, length: int) -> dict[str, Any]:
    """Milliseconds of a prompt by both, once: it takes transformers seconds per layer."""
    warm, prompt = torch.randint(VOCAB, (2, 1, length))
    generate(llm, warm.tolist(), 1)
    ours, written = timed(lambda: generate(llm, prompt.tolist(), 1))
    theirs, output = timed(lambda: model(prompt, logits_to_keep=1))
    return both(ours, theirs) | {"same_tokens": float(output.logits[0, -1].argmax() == written[0][0])}


def generate(llm: LLM, prompts: list[list[int]], steps: int) -> list[list[int]]:
    params = SamplingParams(max_tokens=steps, temperature=0.0, ignore_eos=True, detokenize=False)
    return [list(done.outputs[0].token_ids) for done in llm.generate(prompts, params, use_tqdm=False)]


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    begun = time.perf_counter()
    made = work()
    return time.perf_counter() - begun, made


def both(ours: float, theirs: float) -> dict[str, Any]:
    return {"octavo_ms": 1000 * ours, "transformers_ms": 1000 * theirs, "ratio": theirs / ours}


def rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {key: float(f"{x:.3g}") if isinstance(x, float) else x for key, x in row.items()}


if __name__ == "__main__":
    main()
