"""Explore the trade-off of latency and throughput: loads between one request at a time and all at once.

Like `bench sweep serve`, with the loads found by measuring. Flags are those of `vllm bench sweep
serve_workload`.
"""

import argparse

from octavo.bench.sweep.experiment import ExperimentOptions
from octavo.bench.sweep.serve import SweepOptions, WorkloadOptions, sweep_workloads
from octavo.cli.bench import sweep
from octavo.cli.flags import add_flags, options

EXAMPLES = """\
  octavo bench sweep serve_workload --workload-var max_concurrency --workload-iters 6
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_flags(parser.add_argument_group("WorkloadOptions", WorkloadOptions.__doc__), WorkloadOptions)
    sweep.configure(parser)


def run(args: argparse.Namespace) -> int:
    """Run the sweep; status 1 when it has no result."""
    experiment = ExperimentOptions(**options(args, ExperimentOptions))
    workload = WorkloadOptions(**options(args, WorkloadOptions))
    rows = sweep_workloads(experiment, SweepOptions(**options(args, SweepOptions)), workload, print)
    return int(not rows and not experiment.dry_run)
