"""Tokens per second of an embedding model of BERT-base's shape on a GPU: offline, over HTTP, beside its peer.

    python benchmarks/record.py gpu-embeddings python -m benchmarks.gpu_embeddings [TOKENIZER]

Random weights in bfloat16, mean pooling, texts of 512 and of 50 tokens. TOKENIZER: a folder with BERT's, by
default that of the built-in MiniLM. Over HTTP 16 clients post lists of texts and read bytes, of one server
and of several that share the GPU. sentence-transformers, where it is installed, takes the same texts in its
batches. Prints a JSON line for each length: the best of the rounds, and the least cosine between vectors of
the two; before that each figure as it comes, on the other stream.
"""

import argparse
import contextlib
import http.client
import json
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from octavo import LLM
from octavo.base.hub import installed

SHAPE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
WORDS = ("the", "sea", "is", "calm", "and", "quiet", "river", "through", "old", "town", "where", "people")
COUNTS = {512: 8192, 50: 49152}
OF_REQUEST, CLIENTS = 256, 16
OPTIONS = {"dtype": "bfloat16", "max_num_batched_tokens": 32768, "max_num_seqs": 2048}


def write(folder: Path, tokenizer: Path, dtype: torch.dtype = torch.bfloat16, kind: str = "Bert") -> None:
    """Make a Sentence-BERT folder of random weights that show. kind: a family of transformers"""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SHAPE, initializer_range=0.05)
    model = getattr(transformers, f"{kind}Model")(config, add_pooling_layer=False)
    model.to(dtype).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json"):
        if (tokenizer / name).exists():
            shutil.copy(tokenizer / name, folder)
    kinds = ("Transformer", "Pooling", "Normalize")
    paths = ("", "1_Pooling", "2_Normalize")
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for path in paths[1:]:
        (folder / path).mkdir()
    pooling = {"word_embedding_dimension": 768, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    limits = {"max_seq_length": 512, "do_lower_case": False}
    (folder / "sentence_bert_config.json").write_text(json.dumps(limits))


def texts_of(length: int, count: int) -> list[str]:
    rng = random.Random(length)
    return [" ".join(rng.choices(WORDS, k=length - 2)) for _ in range(count)]


def best(run, rounds: int) -> float:
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)


def note(row: dict, name: str, per_s: float) -> None:
    row[name] = round(per_s)
    print(row["tokens"], name, row[name], file=sys.stderr, flush=True)


@contextlib.contextmanager
def serving(folder: Path, processes: int):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    flags += [f"--api-server-count={processes}"] if processes > 1 else []
    flags += ["--gpu-memory-utilization=0.3", "--disable-access-log"]
    command = [sys.executable, "-m", "octavo", "serve", str(folder), "--port", str(port), *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        for _ in range(600):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
                break
            time.sleep(0.2)
        yield port
    finally:
        process.terminate()
        process.wait(30)


def over_http(ports: list[int], texts: list[str]) -> None:
    bodies = [
        json.dumps(
            {"input": texts[i : i + OF_REQUEST], "encoding_format": "bytes_only", "embed_dtype": "float16"}
        )
        for i in range(0, len(texts), OF_REQUEST)
    ]

    def client(number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", ports[number % len(ports)])
        for body in bodies[number::CLIENTS]:
            connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            data = answer.read()
            assert answer.status == 200, data[:300]
        connection.close()

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(client, range(CLIENTS)))


def peer_of(folder: Path):
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        return None
    return SentenceTransformer(str(folder), device="cuda", model_kwargs={"dtype": torch.bfloat16})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tokenizer", nargs="?", default="")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=6, help="API processes of all servers")
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2], help="that share the GPU")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "bert-base")
        folder.mkdir()
        write(folder, Path(args.tokenizer) if args.tokenizer else Path(installed("minilm")))
        rows = {length: {"tokens": length, "texts": count} for length, count in COUNTS.items()}
        vectors = {}
        with LLM(str(folder), **OPTIONS) as llm:
            for length, count in COUNTS.items():
                texts = texts_of(length, count)
                ids = [out.prompt_token_ids for out in llm.embed(texts[:64], use_tqdm=False)]
                assert all(len(each) == length for each in ids)
                vectors[length] = np.array(
                    [o.outputs.embedding for o in llm.embed(texts[:64], use_tqdm=False)]
                )
                took = best(lambda texts=texts: llm.embed(texts, use_tqdm=False), args.rounds)
                note(rows[length], "offline_tokens_per_s", length * count / took)
        for num_servers in args.servers:
            with contextlib.ExitStack() as servers:
                each = args.processes // num_servers
                ports = [servers.enter_context(serving(folder, each)) for _ in range(num_servers)]
                for length, count in COUNTS.items():
                    texts = texts_of(length, count)
                    over_http(ports, texts[:4096])
                    took = best(lambda t=texts, p=ports: over_http(p, t), args.rounds)
                    note(rows[length], f"http_{num_servers}_servers_tokens_per_s", length * count / took)
        peer = peer_of(folder)
        for length, count in COUNTS.items():
            if peer is not None:
                texts = texts_of(length, count // 4)
                theirs = peer.encode(texts[:64], batch_size=64, normalize_embeddings=True)
                rows[length]["least_cosine"] = float((vectors[length] * theirs).sum(1).min())
                took = best(lambda texts=texts: peer.encode(texts, batch_size=256), args.rounds)
                note(rows[length], "sentence_transformers_tokens_per_s", length * (count // 4) / took)
            print(json.dumps(rows[length]), flush=True)


if __name__ == "__main__":
    main()
