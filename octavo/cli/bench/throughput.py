"""Measure how many requests and tokens per second a model computes, without a server.

All requests are there at once. Flags and result are those of `vllm bench throughput`.
"""

import argparse

from octavo.bench.data_options import DataOptions
from octavo.bench.offline import ThroughputOptions, measure_throughput
from octavo.cli.bench.output import add_output_flag, keep
from octavo.cli.flags import add_engine_flags, add_flags, engine_args, options

EXAMPLES = """\
  octavo bench throughput --input-len 128 --output-len 64 --num-prompts 100
  octavo bench throughput --dataset-name sharegpt --dataset-path sharegpt.json
"""
_KINDS = (ThroughputOptions, DataOptions)
_ELSEWHERE = ("seed",)
"""Fields without a flag here: the engine's --seed is the data set's, too."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="The same as --model.")
    for kind in _KINDS:
        add_flags(parser.add_argument_group(kind.__name__, kind.__doc__), kind, without=_ELSEWHERE)
    add_output_flag(parser)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, and print the rates."""
    args.model = args.model_tag or args.model
    data = DataOptions(**options(args, DataOptions))
    result = measure_throughput(
        engine_args(args), ThroughputOptions(**options(args, ThroughputOptions)), data
    )
    print(
        f"Throughput: {result['requests_per_second']:.2f} requests/s, "
        f"{result['tokens_per_second']:.2f} total tokens/s, "
        f"{result['output_tokens_per_second']:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {result['total_num_tokens'] - result['total_output_tokens']}")
    print(f"Total num output tokens:  {result['total_output_tokens']}")
    keep(args, result)
    return 0
