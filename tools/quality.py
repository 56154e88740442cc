"""What rounded activations cost a model: `python tools/quality.py MODEL [--activations int8] [--tokens N]`.

Scores a text of the standard library (Python's own reference, `pydoc_data.topics`) twice with the same stored
weights: with float32 activations, that is the dequantized model, and with rounded ones. Prints one JSON line:
both perplexities, their ratio, and how often both find the same token likeliest.

`--twins` scores the rounded model by the kernels' slow twins, which round on any CPU: bfloat16 needs them
where there is no AMX.
"""

import argparse
import json
import math
import os
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, from any folder

from octavo import LLM, SamplingParams


class Scores(NamedTuple):
    """Per scored position: the text's own logprob, and the likeliest token."""

    logprobs: list[float]
    likeliest: list[int]

    def perplexity(self) -> float:
        return math.exp(-sum(self.logprobs) / len(self.logprobs))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=10240)
    parser.add_argument("--window", type=int, default=512, help="tokens of one prompt")
    parser.add_argument("--activations", choices=("bfloat16", "int8"), default="int8")
    parser.add_argument("--twins", action="store_true")
    args = parser.parse_args()
    exact = score(args.model, "float32", args.tokens, args.window)
    if args.twins:
        os.environ["OCTAVO_NO_CPU_KERNELS"] = "1"
    rounded = score(args.model, args.activations, args.tokens, args.window)
    same = sum(a == b for a, b in zip(exact.likeliest, rounded.likeliest, strict=True))
    row = {
        "model": Path(args.model).name,
        "positions": len(exact.logprobs),
        "perplexity float32": round(exact.perplexity(), 4),
        f"perplexity {args.activations}": round(rounded.perplexity(), 4),
        "perplexity ratio": round(rounded.perplexity() / exact.perplexity(), 5),
        "top-1 agreement": round(same / len(exact.likeliest), 5),
    }
    print(json.dumps(row))
    return 0


def score(model: str, activations: str, num_tokens: int, window: int) -> Scores:
    """Every position but the first of every window."""
    llm = LLM(model=model, activations=activations, max_model_len=window + 1, enable_prefix_caching=False)
    try:
        tokenizer = llm.get_tokenizer()
        assert tokenizer is not None
        ids = tokenizer.encode("\n\n".join(topics[name] for name in sorted(topics)), add_special_tokens=False)
        start = tokenizer.encode("")  # what the model wants at the beginning of a text
        size = window - len(start)
        prompts = [start + ids[i : i + size] for i in range(0, num_tokens, size)]
        outputs = llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=1))
    finally:
        llm.shutdown()
    positions = [p for output in outputs for p in output.prompt_logprobs or () if p is not None]
    own = [next(iter(position.values())).logprob for position in positions]
    return Scores(own, [next(t for t, entry in p.items() if entry.rank == 1) for p in positions])


if __name__ == "__main__":
    sys.exit(main())
