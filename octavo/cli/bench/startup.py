"""Measure how long an engine takes to start, with an empty cache folder (cold) and a full one (warm).

Flags and result are those of `vllm bench startup`.
"""

import argparse

from octavo.bench.startup import StartupOptions, measure_startup
from octavo.cli.bench.output import add_output_flag, keep
from octavo.cli.flags import add_engine_flags, add_flags, engine_options, options

EXAMPLES = """\
  octavo bench startup --num-iters-cold 0 --num-iters-warm 5
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="The same as --model.")
    add_flags(parser.add_argument_group("StartupOptions", StartupOptions.__doc__), StartupOptions)
    add_output_flag(parser)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, and print mean and percentiles of both kinds."""
    args.model = args.model_tag or args.model
    result = measure_startup(engine_options(args), StartupOptions(**options(args, StartupOptions)))
    for phase in ("cold", "warm"):
        if f"avg_{phase}_startup_time" in result:
            print(f"{phase.upper()} STARTUP: avg {result[f'avg_{phase}_startup_time']:.2f} seconds")
            for share, seconds in result[f"{phase}_startup_percentiles"].items():
                print(f"  {share}%: {seconds:.2f} seconds")
    keep(args, result)
    return 0
