"""What features cost on a GPU: variants of one offline workload beside the plain one, in turn.

    python benchmarks/record.py gpu-features python -m benchmarks.gpu_features --tokenizer DIR [--rows forms]

Qwen3-0.6B's shape with normal-valued weights, so that distributions are peaked (`flat` ones: dummy weights);
nano-vllm's 256 requests of 100 to 1024 tokens in and out. DIR holds a tokenizer of at most 151,936 tokens.
Prints one JSON line per variant: output tokens per second, the quotient to the plain run beside it less 1,
the time of steps, and vLLM 0.26's tokens per second on one H200. Checked in the same run: lengths; that
recorded steps give the tokens of eager ones (row check); that documents which come to their end are valid
(row ended).
"""

import argparse
import itertools
import json
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.gpu import CONFIGS, random_prompts
from benchmarks.structured_overhead import kinds, orders
from octavo import LLM, SamplingParams, TokensPrompt
from octavo.runtime.sampling.output import Moment

Given = Callable[[int], dict[str, Any]]
T06 = {"temperature": 0.6}
T08 = {"temperature": 0.8}

SAMPLED: dict[str, Given] = {
    "top_p_seed": lambda i: T08 | {"top_p": 0.95, "seed": i},
    "top_k_top_p": lambda i: T08 | {"top_k": 50, "top_p": 0.95},
    "min_p": lambda i: T08 | {"min_p": 0.05},
}
VARIANTS: dict[str, Given] = {
    **SAMPLED,
    "penalties": lambda i: (
        T08 | {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1}
    ),
    "logit_bias": lambda i: T06 | {"logit_bias": {str(t): 1.5 for t in range(40)}},
    "bad_words": lambda i: T06 | {"bad_words": ["import torch", "return", "self."]},
    "min_tokens": lambda i: T06 | {"min_tokens": ..., "stop_token_ids": [5, 6]},
    "allowed_ids": lambda i: T06 | {"allowed_token_ids": list(range(5000))},
    "mixed": lambda i: T06 | ({} if i % 8 else {"repetition_penalty": 1.1, "logit_bias": {"17": 2.0}}),
}
"""Compared with T = 0.6 or 0.8, without texts."""
TEXTS: dict[str, Given] = {
    "logprobs5": lambda i: T06 | {"logprobs": 5},
    "logprobs5_again": lambda i: T06 | {"logprobs": 5},
}
VLLM = {
    "plain": 21621,
    "top_p_seed": 21755,
    "flat top_p_seed": 21588,
    "penalties": 23742,
    "logprobs5": 13399,
    "logprobs5_again": 10784,
    "json 256": 5436,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--rows", default="check,sampled,texts,forms,ended,flat")
    parser.add_argument("--only", default="", help="variants, instead of all of these rows")
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = write_model(Path(folder), args.tokenizer)
        bench = Bench(path, args.repeats, set(filter(None, args.only.split(","))))
        for row in args.rows.split(","):
            getattr(bench, row)()
        bench.close()


def write_model(folder: Path, tokenizer: Path) -> Path:
    """Write a checkpoint whose logits have a standard deviation of some 6."""
    config = CONFIGS["qwen3-0.6b"] | {"eos_token_id": 151645}
    (folder / "config.json").write_text(json.dumps(config))
    for file in tokenizer.iterdir():
        shutil.copy(file, folder)
    size, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    shapes = {
        "self_attn.q_proj": (heads * dim, size),
        "self_attn.k_proj": (kv_heads * dim, size),
        "self_attn.v_proj": (kv_heads * dim, size),
        "self_attn.o_proj": (size, heads * dim),
        "mlp.gate_proj": (inner, size),
        "mlp.up_proj": (inner, size),
        "mlp.down_proj": (size, inner),
    }
    norms = {
        "self_attn.q_norm": dim,
        "self_attn.k_norm": dim,
        "input_layernorm": size,
        "post_attention_layernorm": size,
    }
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)

    def normal(deviation: float, *shape: int) -> torch.Tensor:
        made = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        return (made * deviation).cpu()

    weights = {"model.embed_tokens.weight": normal(0.02, config["vocab_size"], size)}
    weights["model.norm.weight"] = torch.full((size,), 6 / (0.02 * size**0.5), dtype=torch.bfloat16)
    for layer in range(config["num_hidden_layers"]):
        for name, shape in shapes.items():
            weights[f"model.layers.{layer}.{name}.weight"] = normal(0.05, *shape)
        for name, width in norms.items():
            weights[f"model.layers.{layer}.{name}.weight"] = torch.ones(width, dtype=torch.bfloat16)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class Bench:
    """One engine after the other over the same checkpoint."""

    def __init__(self, path: Path, repeats: int, only: set[str]) -> None:
        self.path, self.repeats, self.only = path, repeats, only
        self._llm: LLM | None = None
        self._options: dict[str, Any] = {}
        self._seeds = itertools.count()

    def check(self) -> None:
        """Compare recorded steps with eager ones, for all variants at once in one batch."""
        prompts = random_prompts(random.Random(0), [random.Random(1).randint(20, 200)] * 96)
        given = [variant(i) for i, variant in enumerate([*VARIANTS.values()] * 12)][:96]
        params = [params_of(one | {"seed": i}, 48, False) for i, one in enumerate(given)]
        found = []
        for options in ({"enforce_eager": True, "steps_in_flight": 1}, {}):
            outputs = self.llm(**options).generate(as_prompts(prompts), params, use_tqdm=False)
            found.append([list(output.outputs[0].token_ids) for output in outputs])
        equal = sum(a == b for a, b in zip(*found, strict=True))
        print(json.dumps({"row": "check", "requests": len(params), "equal": equal}), flush=True)
        if equal != len(params):
            raise SystemExit("Recorded steps choose other tokens than eager ones.")

    def sampled(self) -> None:
        """Time what changes the choice of tokens."""
        self.compare("", VARIANTS, T06, detokenize=False)

    def flat(self) -> None:
        """Do so where every token is about as likely."""
        self.compare("flat ", SAMPLED, T08, detokenize=False, load_format="dummy")

    def texts(self) -> None:
        """Time what is detokenized."""
        self.compare("", TEXTS, T06, detokenize=True)

    def forms(self) -> None:
        """Time structured output, by kind and number of requests."""
        forms = {"json": [{"json": orders(40)}]} | {k: v for k, v in kinds().items() if k != "orders"}
        for name, given in forms.items():
            for count in (1, 32, 256):
                row = f"{name} {count}"
                if self.only and row not in self.only:
                    continue

                def variant(i: int, given: list[dict[str, Any]] = given) -> dict[str, Any]:
                    return T06 | {"structured_outputs": given[i % len(given)]}

                self.compare("", {row: variant}, T06, detokenize=True, count=count)

    def ended(self) -> None:
        """Validate documents that came to their end."""
        schema = orders(2, 3) | {"additionalProperties": False}
        given = {"temperature": 0.6, "max_tokens": 1000, "structured_outputs": {"json": schema}}
        params = [SamplingParams(seed=i, **given) for i in range(256)]
        prompts = random_prompts(random.Random(2), [64] * 256)
        outputs = [o.outputs[0] for o in self.llm().generate(as_prompts(prompts), params, use_tqdm=False)]
        ended = [output.text for output in outputs if output.finish_reason == "stop"]
        for text in ended:
            jsonschema.validate(json.loads(text), schema)
        assert len(ended) > 200, len(ended)
        print(json.dumps({"row": "ended", "ended": len(ended), "valid": len(ended)}), flush=True)

    def compare(
        self,
        prefix: str,
        variants: dict[str, Given],
        plain: dict[str, Any],
        detokenize: bool,
        count: int = 256,
        **options: object,
    ) -> None:
        """Run every variant and the plain work beside it in turn."""
        llm = self.llm(**options)
        for name, variant in variants.items():
            if self.only and prefix + name not in self.only:
                continue
            runs: tuple[list[dict[str, Any]], ...] = ([], [])
            for _ in range(1 + self.repeats):  # the first pays for what is used for the first time
                for kept, given in zip(runs, (lambda i: plain, variant), strict=True):
                    kept.append(self.time(llm, given, detokenize, count))
            before, after = (sorted(run[1:], key=lambda one: one["tok_s"])[len(run[1:]) // 2] for run in runs)
            cost = statistics.median(
                b["tok_s"] / a["tok_s"] - 1 for b, a in zip(runs[0][1:], runs[1][1:], strict=True)
            )
            row = {"row": prefix + name, "requests": count, **after, "plain": before, "cost": round(cost, 4)}
            print(json.dumps(row | {"vllm": VLLM.get(prefix + name)}), flush=True)

    def time(self, llm: LLM, given: Given, detokenize: bool, count: int) -> dict[str, Any]:
        """Run once; the requests' numbers and lengths are nano-vllm's, the ids of prompts are new."""
        rng = random.Random(0)
        lengths = [(rng.randint(100, 1024), rng.randint(100, 1024)) for _ in range(count)]
        prompts = random_prompts(random.Random(next(self._seeds)), [a for a, _ in lengths])
        ends = [b for _, b in lengths]
        params = [params_of(given(i), end, detokenize) for i, end in enumerate(ends)]
        steps = StepTimes()
        with steps:
            began = time.perf_counter()
            outputs = llm.generate(as_prompts(prompts), params, use_tqdm=False)
            took = time.perf_counter() - began
        found = [len(output.outputs[0].token_ids) for output in outputs]
        if not params[0].structured_outputs and found != ends:
            raise SystemExit("An output has the wrong length.")
        if params[0].structured_outputs and params[0].structured_outputs.json and min(found) > 300:
            assert all(o.outputs[0].text.lstrip()[:1] in "{[" for o in outputs)
        return {"tok_s": round(sum(found) / took), "wall_s": round(took, 3), "out_tok": sum(found)} | steps.ms

    def llm(self, **options: object) -> LLM:
        """Return an engine with these options; the last one ends."""
        if self._llm is None or options != self._options:
            self.close()
            self._llm = LLM(
                str(self.path), dtype="bfloat16", max_model_len=4096, gpu_memory_utilization=0.85, **options
            )
            self._options = options
        return self._llm

    def close(self) -> None:
        if self._llm is not None:
            self._llm.shutdown()
            self._llm = None


class StepTimes:
    """The times between the ends of steps, while it is entered."""

    def __init__(self) -> None:
        self._ends: list[float] = []
        self._waited = 0.0

    def __enter__(self) -> None:
        self._wait = Moment.wait

        def timed(moment: Moment) -> None:
            began = time.perf_counter()
            self._wait(moment)
            self._ends.append(time.perf_counter())
            self._waited += self._ends[-1] - began

        Moment.wait = timed

    def __exit__(self, *error: object) -> None:
        Moment.wait = self._wait

    @property
    def ms(self) -> dict[str, float]:
        if len(self._ends) < 3:
            return {}
        steps = 1e3 * np.diff(self._ends)
        found = {f"step_ms_p{p}": round(float(np.percentile(steps, p)), 3) for p in (50, 99)}
        return found | {"waited_s": round(self._waited, 3)}


def params_of(given: dict[str, Any], max_tokens: int, detokenize: bool) -> SamplingParams:
    if "min_tokens" in given:
        given = given | {"min_tokens": max_tokens}
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, detokenize=detokenize, **given)


def as_prompts(prompts: list[list[int]]) -> list[TokensPrompt]:
    return [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
