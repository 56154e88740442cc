"""What rounding costs a model: `python tools/quality.py MODEL … --settings SETTING … [--tokens N]`.

A setting is arguments of `LLM`: `activations=int8,kv_cache_dtype=bfloat16`. `references,…` computes it by the
kernels' slow references, which round on any CPU: bfloat16 needs them where there is no AMX. `transformers` is
Hugging Face's own model with the GGUF file's weights dequantized: how far octavo's reference is from it.

Each setting scores a text of the standard library (Python's own reference, `pydoc_data.topics`), and so does
the reference: the same weights with activations and KV cache in float32, that is the dequantized model. On a
GPU that is `--reference dtype=float32`.
One JSON line per setting: both perplexities, their ratio, and how often both find the same greedy token.
Scores are kept in the folder `--scores`, a line per window: a run that was stopped goes on where it was, and
what every setting needs is computed once.
"""

import argparse
import json
import math
import os
import platform
import sys
from collections.abc import Iterator
from itertools import islice, product
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, from any folder

from octavo import LLM, SamplingParams
from octavo.base.hub import locate
from octavo.frontend.text.loader import load_tokenizer

REFERENCE = "activations=float32,kv_cache_dtype=float32"
AT_ONCE = 4  # windows in one call; what is lost when a run is stopped


class Scores(NamedTuple):
    """Per scored position: the text's own logprob, and the greedy token."""

    logprobs: list[float]
    greedy: list[int]

    def perplexity(self) -> float:
        return math.exp(-sum(self.logprobs) / len(self.logprobs))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--settings", nargs="+", default=["activations=int8"], metavar="SETTING")
    parser.add_argument("--reference", default=REFERENCE, metavar="SETTING")
    parser.add_argument("--tokens", type=int, default=51200)
    parser.add_argument("--window", type=int, default=512, help="tokens of one prompt")
    parser.add_argument("--scores", type=Path, default=Path("quality-scores"))
    args = parser.parse_args()
    for model, setting in product(args.models, args.settings):
        exact, rounded = (
            score(model, s, args.tokens, args.window, args.scores) for s in (args.reference, setting)
        )
        print(json.dumps(compare(model, setting, args.window, exact, rounded)), flush=True)
    return 0


def compare(model: str, setting: str, window: int, exact: Scores, rounded: Scores) -> dict[str, object]:
    """The row of a setting."""
    pairs = list(zip(exact.greedy, rounded.greedy, strict=True))
    furthest = max(abs(a - b) for a, b in zip(exact.logprobs, rounded.logprobs, strict=True))
    return {
        "model": Path(model).stem,
        "setting": setting,
        "text": f"pydoc_data.topics of Python {platform.python_version()}, prompts of {window}",
        "positions": len(pairs),
        "perplexity reference": round(exact.perplexity(), 4),
        "perplexity": round(rounded.perplexity(), 4),
        "perplexity ratio": round(rounded.perplexity() / exact.perplexity(), 5),
        "top-1 agreement": round(sum(a == b for a, b in pairs) / len(pairs), 5),
        "largest difference of a logprob": round(furthest, 5),
    }


def score(model: str, setting: str, num_tokens: int, window: int, folder: Path) -> Scores:
    """Every position but the first of every window; those that `folder` does not have are computed."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{Path(model).stem} {window} {setting}.jsonl"
    wanted = -(-num_tokens // window)
    known = path.read_text(encoding="ascii").splitlines()[:wanted] if path.exists() else []
    if len(known) < wanted:
        make = transformers_scores if setting == "transformers" else octavo_scores
        prompts = list(islice(windows(model, window), len(known), wanted))
        with path.open("a", encoding="ascii") as file:
            for scores in make(model, setting, prompts):
                known.append(json.dumps(scores))
                print(known[-1], file=file, flush=True)
                print(f"{path.name}: {len(known)} of {wanted} windows", file=sys.stderr, flush=True)
    parts = [Scores(*json.loads(line)) for line in known]
    return Scores([x for part in parts for x in part.logprobs], [x for part in parts for x in part.greedy])


def windows(model: str, size: int) -> Iterator[list[int]]:
    """The text in prompts of `size` tokens, each with what the model wants at the beginning of one."""
    tokenizer = load_tokenizer(locate(model))
    ids = tokenizer.encode("\n\n".join(topics[name] for name in sorted(topics)), add_special_tokens=False)
    start = tokenizer.encode("")
    step = size - len(start)
    return (start + ids[i : i + step] for i in range(0, len(ids) - step + 1, step))


def octavo_scores(model: str, setting: str, prompts: list[list[int]]) -> Iterator[Scores]:
    words = setting.split(",")
    os.environ["OCTAVO_NO_CPU_KERNELS"] = "1" if "references" in words else ""
    length = len(prompts[0])
    options: dict[str, Any] = {"max_model_len": length + 1, "max_num_batched_tokens": 2 * length}
    options["gpu_memory_utilization"] = 0.2  # enough for a few windows, and for other models beside
    llm = LLM(model=model, **options | dict(word.split("=", 1) for word in words if word != "references"))
    try:
        params = SamplingParams(max_tokens=1, prompt_logprobs=1)
        for i in range(0, len(prompts), AT_ONCE):
            for output in llm.generate(prompts[i : i + AT_ONCE], params, use_tqdm=False):
                positions = [p for p in output.prompt_logprobs or () if p is not None]
                own = [next(iter(position.values())).logprob for position in positions]
                yield Scores(own, [next(t for t, entry in p.items() if entry.rank == 1) for p in positions])
    finally:
        llm.shutdown()


def transformers_scores(model: str, _: str, prompts: list[list[int]]) -> Iterator[Scores]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = locate(model)
    oracle = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path.parent, gguf_file=path.name))
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=oracle)["tensors"]
    oracle.load_state_dict(tensors, strict=False)  # what is tied has no tensor
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            logits = oracle.eval()(ids).logits[0, :-1].float()
        own = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        yield Scores(own.tolist(), logits.argmax(-1).tolist())


if __name__ == "__main__":
    sys.exit(main())
