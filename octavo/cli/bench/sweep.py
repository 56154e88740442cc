"""Run `bench serve` under many configurations of server and load, and keep every result.

--serve-params and --bench-params are JSON files: a list of objects with options, or such objects by name.
Every combination is measured --num-runs times. Flags and files are those of `vllm bench sweep serve`.
"""

import argparse

from octavo.bench.sweep.experiment import ExperimentOptions
from octavo.bench.sweep.serve import SweepOptions, sweep_serve
from octavo.cli.flags import add_flags, options

EXAMPLES = """\
  octavo bench sweep serve --serve-cmd "octavo serve smollm2" --serve-params serve.json -o results
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_flags(parser.add_argument_group("SweepOptions", SweepOptions.__doc__), SweepOptions)
    add_experiment_flags(parser)


def add_experiment_flags(parser: argparse.ArgumentParser) -> None:
    """Declare where results go."""
    group = parser.add_argument_group("ExperimentOptions", ExperimentOptions.__doc__)
    add_flags(group, ExperimentOptions, short={"output_dir": "-o", "experiment_name": "-e"})


def run(args: argparse.Namespace) -> int:
    """Run the sweep; status 1 when it has no result."""
    experiment = ExperimentOptions(**options(args, ExperimentOptions))
    rows = sweep_serve(experiment, SweepOptions(**options(args, SweepOptions)), print)
    return int(not rows and not experiment.dry_run)
