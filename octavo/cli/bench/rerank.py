"""Put a load of queries and documents on a server's /v1/rerank: `bench serve` for rerankers.

Each request has one query and --random-batch-size documents; random texts, unless a data set is named.
"""

import argparse

from octavo.cli.bench import serve

EXAMPLES = """\
  octavo bench rerank --num-prompts 320 --random-batch-size 32 --random-input-len 128
"""
_DEFAULTS = {"backend": "vllm-rerank", "dataset_name": "random-rerank", "random_batch_size": 16}

configure = serve.configure


def run(args: argparse.Namespace) -> int:
    """Run the benchmark and print its table."""
    for name, value in _DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return serve.run(args)
