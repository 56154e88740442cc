"""Measure how long one batch of prompts takes in a model, with the flags and the result of `vllm bench
latency`.

The prefix cache is off unless asked for: every round has the same prompts.
"""

import argparse

from octavo.bench.offline import LatencyOptions, measure_latency
from octavo.cli.bench.output import add_output_flag, keep
from octavo.cli.flags import add_engine_flags, add_flags, engine_args, options

EXAMPLES = """\
  octavo bench latency --input-len 32 --output-len 128 --batch-size 8
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="The same as --model.")
    add_flags(parser.add_argument_group("LatencyOptions", LatencyOptions.__doc__), LatencyOptions)
    add_output_flag(parser)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, and print mean and percentiles."""
    args.model = args.model_tag or args.model
    if args.enable_prefix_caching is None:
        args.enable_prefix_caching = False
    result = measure_latency(engine_args(args), LatencyOptions(**options(args, LatencyOptions)))
    if result:
        print(f"Avg latency: {result['avg_latency']} seconds")
        for share, seconds in result["percentiles"].items():
            print(f"{share}% percentile latency: {seconds} seconds")
        keep(args, result)
    return 0
