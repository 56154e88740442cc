"""Draw one field of a sweep's results over another, in a grid, with a line per combination of options.

Needs matplotlib: pip install "octavo[bench]".
"""

import argparse
from pathlib import Path

from octavo.bench.sweep.plot import PlotOptions, plot_sweep
from octavo.cli.flags import add_flags, options

EXAMPLES = """\
  octavo bench sweep plot results/first --var-x max_concurrency --curve-by max_num_seqs
  octavo bench sweep plot results/first --row-by model --filter-by "p99_ttft_ms<2000" --scale-y log
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("experiment_dir", type=Path, metavar="DIR", help="Folder of the experiment.")
    add_flags(parser.add_argument_group("PlotOptions", PlotOptions.__doc__), PlotOptions)


def run(args: argparse.Namespace) -> int:
    """Draw, and say where."""
    print(*plot_sweep(args.experiment_dir, PlotOptions(**options(args, PlotOptions))), sep="\n")
    return 0
