"""Run `bench startup` under many configurations, and keep every result.

Flags and files are those of `vllm bench sweep startup`.
"""

import argparse

from octavo.bench.sweep.experiment import ExperimentOptions
from octavo.bench.sweep.serve import SweepStartupOptions, sweep_startup
from octavo.cli.bench.sweep import add_experiment_flags
from octavo.cli.flags import add_flags, options

EXAMPLES = """\
  octavo bench sweep startup --serve-params engines.json --num-runs 1
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_flags(
        parser.add_argument_group("SweepStartupOptions", SweepStartupOptions.__doc__), SweepStartupOptions
    )
    add_experiment_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Run the sweep; status 1 when it has no result."""
    experiment = ExperimentOptions(**({"num_runs": 1} | options(args, ExperimentOptions)))
    rows = sweep_startup(experiment, SweepStartupOptions(**options(args, SweepStartupOptions)), print)
    return int(not rows and not experiment.dry_run)
