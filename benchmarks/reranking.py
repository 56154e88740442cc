"""Seconds to rerank 100 documents of 128 tokens on the CPU, beside sentence-transformers' CrossEncoder.

    python benchmarks/record.py cpu-reranking python -m benchmarks.reranking PYTHON

PYTHON: of an environment that has sentence-transformers. The cross-encoder has MiniLM's weights and a random
head. Both compute in their default precision with as many threads as they choose, in turn; the peer in
batches of 32. Prints a JSON line: medians of the rounds, and the largest difference between two scores.
"""

import argparse
import json
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification

from benchmarks.embeddings import PEER, WORDS, Peer
from octavo import LLM
from octavo.base.hub import installed

QUERY, DOCUMENTS, LENGTH = "where people find the calm sea", 100, 128
CROSS_ENCODER = PEER.replace("SentenceTransformer", "CrossEncoder").replace("encode", "predict")


def write(folder: Path) -> None:
    """Make a cross-encoder of MiniLM, with a head whose scores differ."""
    torch.manual_seed(0)
    source = Path(installed("minilm"))
    model = AutoModelForSequenceClassification.from_pretrained(source, num_labels=1)
    torch.nn.init.normal_(model.classifier.weight, std=0.5)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json"):
        shutil.copy(source / name, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("python")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    rng = random.Random(1)
    documents = [" ".join(rng.choices(WORDS, k=LENGTH)) for _ in range(DOCUMENTS)]
    with tempfile.TemporaryDirectory() as place:
        write(Path(place))
        peer = Peer(args.python, CROSS_ENCODER, place)
        with LLM(place) as llm:
            ours, theirs = [], []
            for _ in range(args.rounds + 1):
                began = time.perf_counter()
                outputs = llm.score(QUERY, documents, use_tqdm=False)
                ours.append(time.perf_counter() - began)
                took, expected = peer.encode([(QUERY, document) for document in documents])
                theirs.append(took[0])
            scores = np.array([output.outputs.score for output in outputs])
        peer.close()
    medians = {"octavo_s": statistics.median(ours[1:]), "cross_encoder_s": statistics.median(theirs[1:])}
    row = {"documents": DOCUMENTS, "tokens": LENGTH, "rounds": args.rounds} | medians
    row["ratio"] = round(statistics.median(b / a for a, b in list(zip(ours, theirs, strict=True))[1:]), 2)
    row["largest_difference"] = float(np.abs(scores - expected).max())
    print(json.dumps(row | {"spread_of_scores": float(np.ptp(expected))}), flush=True)


if __name__ == "__main__":
    main()
