"""What speculation brings and costs: tokens per second with and without it, in turns, of the same texts.

    python benchmarks/record.py speculation python -m benchmarks.speculation

The default model on the CPU, two engines in one process. Edits: a file of this repository and the beginning
of its changed copy. Turns: an agent's requests that came before. JSON: a schema without white space. Chat:
stories at a temperature, where hardly anything repeats. Prints one JSON line per workload and batch: medians
of the rounds' tokens per second and of their quotients, drafts and what of them came true; who is first takes
turns. Texts must be equal. With --twin a second plain engine runs beside: its quotients to the first are
what the machine makes of two that do the same.
"""

import argparse
import json
import statistics
import time
from contextlib import ExitStack
from pathlib import Path

from octavo import LLM, SamplingParams, StructuredOutputsParams
from octavo.config.model import DEFAULT_MODEL

ROOT = Path(__file__).resolve().parents[1]
SCHEMA = {
    "type": "object",
    "properties": {
        "customer_name": {"type": "string", "maxLength": 20},
        "shipping_address": {
            "type": "object",
            "properties": {
                "street_name": {"type": "string", "maxLength": 20},
                "postal_code": {"type": "string", "maxLength": 8},
                "country": {"enum": ["Germany", "France", "Netherlands"]},
            },
            "required": ["street_name", "postal_code", "country"],
            "additionalProperties": False,
        },
        "order_status": {"enum": ["delivered", "in transit", "waiting for payment"]},
        "total_price": {"type": "integer", "minimum": 0, "maximum": 9999},
    },
    "required": ["customer_name", "shipping_address", "order_status", "total_price"],
    "additionalProperties": False,
}
SUBJECTS = ("a river", "two friends", "a lost key", "winter", "the sea", "a train", "an old map", "bread")


def edits():
    """Prompts: a file, then the beginning of its copy in which a name is another."""
    prompts = []
    for name, old, new in (
        ("base/lru.py", "LRU", "Recent"),
        ("engine/speculation/token_run.py", "TokenRun", "Tokens"),
        ("config/speculative.py", "Speculation", "Guessing"),
    ):
        lines = (ROOT / "octavo" / name).read_text().splitlines(keepends=True)[:70]
        text = "".join(lines)
        begun = "".join(lines[:12]).replace(old, new)
        prompts.append(
            f"```python\n{text}```\nThe same file, where {old} is called {new}:\n```python\n{begun}"
        )
    return prompts


def turns():
    return [
        f"Results of step {i}: the tests passed, 3 files changed.\nWrite the report of step {i} as a list:\n"
        for i in range(4)
    ]


def chats(count):
    return [f"Tell a story about {SUBJECTS[i % 8]} in {1990 + i}.\n" for i in range(count)]


def workloads():
    """(name, options of the engine that guesses, batch, prompts, parameters)"""
    structured = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
    order = [f"Write the order number {i} as JSON:\n" for i in range(6)]
    yield "edits", "ngram", 1, edits(), {"max_tokens": 200, "temperature": 0}
    yield "turns", "suffix", 1, turns(), {"max_tokens": 150, "temperature": 0}
    yield (
        "json",
        "jump_ahead",
        1,
        order,
        {"max_tokens": 120, "temperature": 0, "structured_outputs": structured},
    )
    for batch in (1, 4, 16):
        params = {"max_tokens": 128, "temperature": 0.8, "seed": 1, "ignore_eos": True}
        yield "chat", "ngram", batch, chats(max(batch, 3)), params


def run(llm, batch, prompts, params):
    """(tokens per second, texts) of the prompts, so many at once."""
    begun, texts = time.perf_counter(), []
    for start in range(0, len(prompts), batch):
        outputs = llm.generate(prompts[start : start + batch], SamplingParams(**params), use_tqdm=False)
        texts += [out.outputs[0].token_ids for out in outputs]
    return sum(map(len, texts)) / (time.perf_counter() - begun), texts


def drafts(llm):
    values = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    return [values[f"vllm:spec_decode_num_{name}"] for name in ("drafts", "draft_tokens", "accepted_tokens")]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="a workload")
    parser.add_argument("--twin", action="store_true", help="a second plain engine beside")
    args = parser.parse_args()
    options = {"max_model_len": 2048, "max_num_seqs": 32, "num_gpu_blocks_override": 1200}
    with ExitStack() as stack:
        plain, *twin = (stack.enter_context(LLM(args.model, **options)) for _ in range(1 + args.twin))
        for name, method, batch, prompts, params in workloads():
            if args.only not in ("", name):
                continue
            with LLM(args.model, spec_method=method, **options) as guessing:
                engines = [plain, guessing, *twin]
                for llm in engines:  # sizes are recorded, and turns have come before
                    run(llm, batch, prompts, params)
                before, rates = drafts(guessing), []
                for number in range(args.rounds):
                    first = number % len(engines)
                    found = {
                        llm: run(llm, batch, prompts, params) for llm in engines[first:] + engines[:first]
                    }
                    assert all(each[1] == found[plain][1] for each in found.values()), "a text changed"
                    rates.append([found[llm][0] for llm in engines])
                counts = [now - then for now, then in zip(drafts(guessing), before, strict=True)]
            quotients, *twins = (
                sorted(round(each[place] / each[0], 3) for each in rates) for place in range(1, len(engines))
            )
            row = {
                "workload": name,
                "method": method,
                "batch": batch,
                "plain_tokens_per_s": round(statistics.median(each[0] for each in rates), 1),
                "tokens_per_s": round(statistics.median(each[1] for each in rates), 1),
                "quotient": round(statistics.median(quotients), 3),
                **dict(zip(("drafts", "draft_tokens", "accepted_tokens"), counts, strict=True)),
            }
            if twins:
                row |= {"quotients": quotients, "twin_quotients": twins[0]}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
