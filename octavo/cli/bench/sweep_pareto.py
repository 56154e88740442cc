"""Draw the Pareto curve of a sweep: tokens per second of a user against those of a device.

Needs matplotlib: pip install "octavo[bench]".
"""

import argparse
from pathlib import Path

from octavo.bench.sweep.plot import ParetoOptions, plot_pareto
from octavo.cli.flags import add_flags, options

EXAMPLES = """\
  octavo bench sweep plot_pareto results/20260102_030405 --label-by max_concurrency,max_num_batched_tokens
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("experiment_dir", type=Path, metavar="DIR", help="Folder of the experiment.")
    add_flags(parser.add_argument_group("ParetoOptions", ParetoOptions.__doc__), ParetoOptions)


def run(args: argparse.Namespace) -> int:
    """Draw, and say where."""
    print(plot_pareto(args.experiment_dir, ParetoOptions(**options(args, ParetoOptions))))
    return 0
