"""What it brings octavo and other engines to look tokens up in the prompt: edits of files, in turn.

    python benchmarks/record.py speculation-peers python -m benchmarks.speculation_peers --rounds 3
        llama.cpp=/venv/bin/python:MODEL.gguf [vLLM=/other/bin/python:FOLDER]

Each peer is a name, the Python that has it (or a script that sets variables and runs it), and the same
model in a form that it takes. Every way of guessing is a process of its own that stays; rounds go from one
to the next. The prompts are those of benchmarks/speculation; no engine keeps anything of them. A row per
engine and way: tokens per second with the prompt and, as the time of one token is taken off, without;
medians; their quotients to the same engine's plain ones; whether the texts are the same as without
guessing, and how many first tokens are octavo's.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from itertools import takewhile
from pathlib import Path

MAX_TOKENS = 200
WAYS = {
    "octavo": ("plain", "ngram"),
    "llama.cpp": ("plain", "lookup 2", "lookup 10"),
    "vLLM": ("plain", "ngram 5"),
}
"""Of llama.cpp 10 tokens are what its class guesses by default, 2 what it recommends for CPUs."""


def octavo(way, model):
    """A function from texts and a number of tokens to the tokens of each."""
    from octavo import LLM, SamplingParams

    llm = LLM(
        model,
        max_model_len=2048,
        num_gpu_blocks_override=300,
        enable_prefix_caching=False,
        **({} if way == "plain" else {"spec_method": way}),
    )

    def run(texts, count):
        params = SamplingParams(max_tokens=count, temperature=0)
        return [llm.generate([text], params, use_tqdm=False)[0].outputs[0].token_ids for text in texts]

    return run


def llama(way, model):
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    count = way.removeprefix("lookup ")
    draft = None if way == "plain" else LlamaPromptLookupDecoding(num_pred_tokens=int(count))
    threads = len(os.sched_getaffinity(0))
    common = {
        "n_ctx": 2048,
        "n_threads": threads,
        "n_threads_batch": threads,
        "verbose": False,
        "logits_all": way != "plain",
    }
    llm = Llama(model, draft_model=draft, **common)

    def one(text, count):
        ids, found = llm.tokenize(text.encode(), add_bos=False, special=True), []
        llm.reset()
        for token in llm.generate(ids, temp=0.0, top_k=1, repeat_penalty=1.0):
            found.append(token)
            if token == llm.token_eos() or len(found) == count:
                return found
        return found

    return lambda texts, count: [one(text, count) for text in texts]


def vllm(way, model):
    from vllm import LLM, SamplingParams

    guessing = {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 2,
    }
    llm = LLM(
        model,
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=16,
        distributed_executor_backend="uni",
        enable_prefix_caching=False,
        speculative_config=None if way == "plain" else guessing,
    )

    def run(texts, count):
        params = SamplingParams(max_tokens=count, temperature=0)
        outputs = [llm.generate([text], params, use_tqdm=False)[0] for text in texts]
        return [list(output.outputs[0].token_ids) for output in outputs]

    return run


MAKERS = {"octavo": octavo, "llama.cpp": llama, "vLLM": vllm}


def inside(engine, way, model):
    """Measure as often as a line comes; what engines print goes elsewhere."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    run, texts = MAKERS[engine](way, model), None
    for line in sys.stdin:
        texts = texts or json.loads(line)
        took = []
        for count in (1, MAX_TOKENS):
            begun = time.perf_counter()
            found = run(texts, count)
            took.append(time.perf_counter() - begun)
        print(
            json.dumps({"took_s": took, "tokens": [list(map(int, ids)) for ids in found]}),
            file=answers,
            flush=True,
        )


class Engine:
    """A process that measures when it is told."""

    def __init__(self, engine, way, python, model):
        self.engine, self.way, self.rates, self.tokens = engine, way, [], None
        command = [python, str(Path(__file__).resolve()), "inside", engine, way, model]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def measure(self, texts):
        """(tokens per second with the prompt, without it)"""
        self._process.stdin.write(json.dumps(texts) + "\n")
        self._process.stdin.flush()
        told = json.loads(self._process.stdout.readline())
        (first_s, whole_s), self.tokens = told["took_s"], told["tokens"]
        count = sum(map(len, self.tokens))
        return count / whole_s, (count - len(texts)) / (whole_s - first_s)

    def close(self):
        self._process.stdin.close()
        self._process.wait()


def rows(engines):
    """In the engines' order: the plain one of each comes first."""
    medians = {
        (e.engine, e.way): [statistics.median(values) for values in zip(*e.rates, strict=True)]
        for e in engines
    }
    plain = {e.engine: e for e in engines if e.way == "plain"}
    for engine in engines:
        whole, decoding = medians[engine.engine, engine.way]
        base = medians[engine.engine, "plain"]
        alike = [
            len(list(takewhile(lambda pair: pair[0] == pair[1], zip(mine, first, strict=False))))
            for mine, first in zip(engine.tokens, engines[0].tokens, strict=True)
        ]
        yield {
            "workload": "edits",
            "engine": engine.engine,
            "way": engine.way,
            "tokens": sum(map(len, engine.tokens)),
            "tokens_per_s": round(whole, 1),
            "quotient": round(whole / base[0], 3),
            "decoding_tokens_per_s": round(decoding, 1),
            "decoding_quotient": round(decoding / base[1], 3),
            "rounds": [[round(value, 1) for value in pair] for pair in engine.rates],
            "as_plain": engine.tokens == plain[engine.engine].tokens,
            "first_tokens_as_octavo": alike,
        }


def main():
    if sys.argv[1:2] == ["inside"]:
        inside(*sys.argv[2:])
        return
    from benchmarks.speculation import edits
    from octavo.base.hub import installed

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("peers", nargs="*", metavar="NAME=PYTHON:MODEL")
    args = parser.parse_args()
    places = {"octavo": [sys.executable, str(installed("smollm2"))]}
    places |= {name: place.split(":", 1) for name, place in (peer.split("=", 1) for peer in args.peers)}
    engines = [Engine(name, way, *place) for name, place in places.items() for way in WAYS[name]]
    texts = edits()
    for number in range(args.rounds + 1):  # the first prepares
        for engine in engines:
            found = engine.measure(texts)
            if number:
                engine.rates.append(found)
    for engine in engines:
        engine.close()
    for row in rows(engines):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
