"""What speculation costs on a GPU: steps with drafts beside plain ones, of the same model in turns.

    python benchmarks/record.py gpu-speculation python -m benchmarks.gpu_speculation

Llama-3.1-8B's shape with dummy weights; two engines share the GPU; with --ranks 2 or --stages 2, two GPUs.
`ngram`, `suffix`, `ngram_gpu`: 7 drafts, looked up. `eagle3`: 3 drafts of a head of one layer, taken at a
given rate (synthetic), as it is not trained; verified: kept only where they are right, which is hardly
ever, so that texts can be compared. Row batch 1: the time of a step that drafts and verifies, by that of a
plain step; all drafts are verified; without the prompt and the first 16 tokens, which are computed in a run
of their own and taken off. Row batch 64: tokens per second of both engines and their quotient, with as many
drafts as pay, where no text repeats itself (T = 1), half of them do, or all. Texts are compared; equal: how
many are.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.gpu import CONFIGS, random_prompts
from octavo import LLM, SamplingParams, TokensPrompt

MODEL = "llama-3.1-8b"
PLAIN: dict[str, Any] = {}
NGRAM = {"method": "ngram", "num_speculative_tokens": 7}
SUFFIX = NGRAM | {"method": "suffix"}
ALWAYS = {"enable_adaptive_verification": False}
DRAFT_VOCAB = 32_000
START = 16
RATE = 3.0
"""Tokens of a step with EAGLE's drafts: 2 of 3 are taken."""


def write_head(folder: Path, config: dict[str, Any]) -> Path:
    """A head of EAGLE-3, with normal-valued weights and a quarter of the vocabulary."""
    size, inner, kv = config["hidden_size"], config["intermediate_size"], config["num_key_value_heads"] * 128
    attention, mlp = "midlayer.self_attn", "midlayer.mlp"
    shapes = {
        "fc": (size, 3 * size),
        "lm_head": (DRAFT_VOCAB, size),
        f"{attention}.q_proj": (size, 2 * size),
        f"{attention}.k_proj": (kv, 2 * size),
        f"{attention}.v_proj": (kv, 2 * size),
        f"{attention}.o_proj": (size, size),
        f"{mlp}.gate_proj": (inner, size),
        f"{mlp}.up_proj": (inner, size),
        f"{mlp}.down_proj": (size, inner),
    }
    norms = (
        "norm",
        *(f"midlayer.{at}" for at in ("hidden_norm", "input_layernorm", "post_attention_layernorm")),
    )
    tensors = {
        f"{name}.weight": torch.randn(shape, dtype=torch.bfloat16) * shape[1] ** -0.5
        for name, shape in shapes.items()
    } | {f"{name}.weight": torch.ones(size, dtype=torch.bfloat16) for name in norms}
    tensors["d2t"] = torch.zeros(DRAFT_VOCAB, dtype=torch.int64)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    own = {"num_hidden_layers": 1, "draft_vocab_size": DRAFT_VOCAB}
    Path(folder, "config.json").write_text(json.dumps(config | own), encoding="utf-8")
    return folder


class Engine:
    """One engine, and what it counted."""

    def __init__(self, folder: Path, speculative: dict[str, Any], sizes: dict[str, int]) -> None:
        self._llm = LLM(
            str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=4096,
            max_num_seqs=256,
            num_gpu_blocks_override=600,
            speculative_config=speculative,
            **sizes,
        )

    def close(self) -> None:
        self._llm.shutdown()

    def run(self, prompts: list[list[int]], params: list[SamplingParams]) -> tuple[float, list[list[int]]]:
        """(seconds, tokens)"""
        began = time.perf_counter()
        given = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        outputs = self._llm.generate(given, params, use_tqdm=False)
        return time.perf_counter() - began, [list(output.outputs[0].token_ids) for output in outputs]

    def counts(self) -> tuple[float, float]:
        """(steps that verified drafts, drafts that were taken)"""
        values = {m.name: m.value for m in self._llm.get_metrics() if hasattr(m, "value")}
        names = ("num_drafts", "num_accepted_tokens")
        drafts, accepted = (values.get(f"vllm:spec_decode_{name}", 0.0) for name in names)
        return drafts, accepted


def params_of(
    count: int, temperature: float = 0.0, first: int = 0, max_tokens: int = 256
) -> list[SamplingParams]:
    return [
        SamplingParams(
            temperature=0.0 if i < first else temperature,
            seed=i,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
        )
        for i in range(count)
    ]


def alone(plain: Engine, other: Engine, name: str, repeats: int) -> dict[str, Any]:
    """One request: what a step with drafts takes, in plain steps."""
    quotients, steps_ms, equal, params = [], [], 0, params_of(1, max_tokens=512)
    start = params_of(1, max_tokens=START)
    for number in range(-1, repeats):  # the first is to capture and to learn
        prompts = random_prompts(random.Random(number), [128])
        if number < 0 or name == "suffix":
            other.run(prompts, params)  # suffixes of this output are known then
        timed: list[tuple[float, list[list[int]], tuple[float, float]]] = []
        for engine in (plain, other):
            engine.run(prompts, start)  # the prompt is in the cache then
            for wanted in (start, params):
                before = engine.counts()
                took_s, found = engine.run(prompts, wanted)
                drafts, accepted = (now - then for now, then in zip(engine.counts(), before, strict=True))
                timed.append((took_s, found, (drafts, accepted)))
        usual_s, took_s = timed[1][0] - timed[0][0], timed[3][0] - timed[2][0]
        expected, found = timed[1][1], timed[3][1]
        drafts, accepted = (long - short for long, short in zip(timed[3][2], timed[2][2], strict=True))
        step_s = usual_s / (len(expected[0]) - START)
        num_plain = len(found[0]) - START - accepted - drafts
        if number >= 0:
            steps_ms.append(1e3 * step_s)
            quotients.append((took_s - num_plain * step_s) / max(1, drafts) / step_s)
            equal += found == expected
    return {
        "row": "batch 1",
        "method": name,
        "plain_ms": round(statistics.median(steps_ms), 3),
        "step_by_plain": round(statistics.median(quotients), 3),
        "speedup": round(usual_s / took_s, 2),
        "drafts": drafts,
        "accepted": accepted,
        "equal": f"{equal} of {repeats}",
    }


def together(plain: Engine, other: Engine, first: int, repeats: int) -> dict[str, Any]:
    """64 requests, the first of them greedy, the others drawn at temperature 1."""
    rates: list[list[float]] = []
    for number in range(-1, repeats):
        prompts, params = random_prompts(random.Random(number), [128] * 64), params_of(64, 1.0, first)
        before = other.counts()
        found = [engine.run(prompts, params) for engine in (plain, other)]
        drafts, accepted = (now - then for now, then in zip(other.counts(), before, strict=True))
        if number >= 0:
            rates.append([64 * 256 / took_s for took_s, _ in found])
    equal = sum(a == b for a, b in zip(found[0][1], found[1][1], strict=True))
    return {
        "row": "batch 64",
        "method": "ngram",
        "greedy": first,
        "plain_tok_s": round(statistics.median(rate for rate, _ in rates)),
        "tok_s": round(statistics.median(rate for _, rate in rates)),
        "quotient": round(statistics.median(rate / usual for usual, rate in rates), 3),
        "drafts": drafts,
        "accepted": accepted,
        "equal": equal,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="method of the rows of batch 1, which are all then")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--stages", type=int, default=1)
    args = parser.parse_args()
    sizes = {"tensor_parallel_size": args.ranks, "pipeline_parallel_size": args.stages}
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root, "model")
        folder.mkdir()
        Path(folder, "config.json").write_text(json.dumps(CONFIGS[MODEL]))
        head = write_head(Path(root, "head"), CONFIGS[MODEL])
        eagle = {
            "method": "eagle3",
            "model": str(head),
            "num_speculative_tokens": 3,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": RATE,
        }
        plain = Engine(folder, PLAIN, sizes)
        honest = {name: eagle[name] for name in ("method", "model", "num_speculative_tokens")}
        for name, speculative in (
            ("suffix", SUFFIX | ALWAYS),
            ("ngram", NGRAM | {"prompt_lookup_min": 1} | ALWAYS),
            ("eagle3", eagle | ALWAYS),
            ("eagle3, verified", honest | ALWAYS),
            ("ngram_gpu", NGRAM | {"method": "ngram_gpu", "prompt_lookup_min": 1} | ALWAYS),
        ):
            if args.only and name not in args.only.split("+"):
                continue
            other = Engine(folder, speculative, sizes)
            print(json.dumps(alone(plain, other, name, args.repeats)), flush=True)
            other.close()
        if args.only:
            return
        other = Engine(folder, NGRAM, sizes)
        for first in (0, 32, 64):
            print(json.dumps(together(plain, other, first, args.repeats)), flush=True)


if __name__ == "__main__":
    main()
