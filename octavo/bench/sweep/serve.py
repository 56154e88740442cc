"""`bench sweep serve`: every server configuration with every load; `serve_workload`: loads that are found.

The workload explorer measures one request at a time and all at once, takes the throughput of these as ends,
and measures rates (or concurrencies) between them.
"""

import math
import shlex
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from octavo.base.errors import ConfigError
from octavo.bench.server_process import ServerProcess
from octavo.bench.sweep.experiment import Experiment, ExperimentOptions, Rows, runnable
from octavo.bench.sweep.settings import (
    Settings,
    applied,
    are_linked,
    file_name,
    name_of,
    pairs_of,
    read_settings,
)
from octavo.config.option import option

_ALL_METRICS = "ttft,tpot,itl,e2el"
_NUM_PROMPTS = 1000
"""What `bench serve` sends when it is not told."""


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """What is started and measured."""

    serve_cmd: str = option("octavo serve", "Command that starts the server.")
    bench_cmd: str = option("octavo bench serve", "Command that measures it.")
    after_bench_cmd: str = option("", "Command after each run, instead of emptying the server's caches.")
    serve_params: str = option("", "JSON file: options of the server, a list of objects or objects by name.")
    bench_params: str = option("", "The same for the benchmark.")
    link_vars: str = option("", "Pairs that must be equal, as max_num_seqs=max_concurrency,…")
    warmup_num_prompts: int = option(0, "Requests in a run before each combination that does not count.")
    server_ready_timeout: int = option(300, "Seconds that a server may take to start.")


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """Which loads are explored."""

    workload_var: str = option(
        "request_rate", "What is changed.", choices=("request_rate", "max_concurrency")
    )
    workload_iters: int = option(10, "Levels of load, the two ends included.")


@dataclass
class Combination:
    """A running server (None in a dry run) and a load to be measured on it."""

    experiment: Experiment
    options: SweepOptions
    serve: Settings
    server: ServerProcess | None

    def run(self, client: Settings, *, workload: str = "") -> Rows:
        """Return the results of all runs of one load."""
        parts = [
            f"{kind}-{name}"
            for kind, name in (("SERVE", name_of(self.serve)), ("BENCH", name_of(client)))
            if name
        ]
        base = self.experiment.folder / file_name(
            "-".join([*parts, *([f"WL-{workload}"] if workload else [])])
        )
        command = applied(shlex.split(self.options.bench_cmd), client)
        if self.options.warmup_num_prompts and self.server:
            warm_up = applied(command, {"num_prompts": self.options.warmup_num_prompts})
            self.experiment.run(warm_up, base)
        points = [self.serve, client]
        command += ["--percentile-metrics", _ALL_METRICS, "--save-result"]

        def made(path: Path) -> list[str]:
            return [*command, "--result-dir", str(path.parent), "--result-filename", path.name]

        return self.experiment.measure(base, made, points, self._after)

    def _after(self) -> None:
        if self.options.after_bench_cmd:
            self.experiment.run(shlex.split(self.options.after_bench_cmd), self.experiment.folder)
        elif self.server:
            self.server.empty_caches()


def sweep_serve(experiment: ExperimentOptions, options: SweepOptions, say: Callable[[str], None]) -> Rows:
    """Run every linked combination; the results. Raises OctavoError."""
    pairs = pairs_of(options.link_vars)
    clients = read_settings(options.bench_params)

    def measure(combination: Combination) -> Rows:
        linked = [client for client in clients if are_linked(combination.serve, client, pairs)]
        return [row for client in linked for row in combination.run(client)]

    return _each_server(Experiment(experiment, say), options, measure)


def sweep_workloads(
    experiment: ExperimentOptions,
    options: SweepOptions,
    workload: WorkloadOptions,
    say: Callable[[str], None],
) -> Rows:
    """Explore the loads of every combination; the results. Raises OctavoError."""
    if workload.workload_iters < 2:
        raise ConfigError("--workload-iters should be at least 2.")
    clients = read_settings(options.bench_params)
    if any(workload.workload_var in client for client in clients):
        raise ConfigError(
            f"Leave {workload.workload_var} out of --bench-params: it is explored automatically."
        )

    def measure(combination: Combination) -> Rows:
        return [row for client in clients for row in _explore(combination, client, workload)]

    return _each_server(Experiment(experiment, say), options, measure)


def _each_server(
    experiment: Experiment, options: SweepOptions, measure: Callable[[Combination], Rows]
) -> Rows:
    rows: Rows = []
    for serve in read_settings(options.serve_params):
        command = applied(shlex.split(options.serve_cmd), serve)
        name = f"SERVE-{name_of(serve) or 'default'}"
        experiment.say(f"start {' '.join(command)}")
        with experiment.failures(experiment.folder / file_name(f"{name}-failure.json")):
            server = nullcontext(None) if experiment.options.dry_run else ServerProcess(
                runnable(command), experiment.log_of(name), ready_timeout_s=options.server_ready_timeout
            )  # fmt: skip
            with server as running:
                rows += measure(Combination(experiment, options, serve, running))
    experiment.finish(rows)
    return rows


def _explore(combination: Combination, client: Settings, options: WorkloadOptions) -> Rows:
    """One at a time, all at once, then levels between the throughputs of these."""
    name = options.workload_var
    most = int(_num_prompts(client, shlex.split(combination.options.bench_cmd)))
    ends = [
        combination.run(client | {"max_concurrency": at_once, name: at_once}, workload=f"{name}={at_once}")
        for at_once in (1, most)
    ]
    if not all(ends):
        return []
    low, high = (np.mean([_level(row, name) for row in rows]) for rows in ends)
    levels = np.linspace(math.ceil(low), math.floor(high), options.workload_iters)[1:-1]
    rows = [
        row
        for level in sorted({round(level) for level in levels} - {0})
        for row in combination.run(client | {name: level}, workload=f"{name}={level}")
    ]
    return [*ends[0], *rows, *ends[1]]


def _level(row: dict[str, Any], name: str) -> float:
    """The load that a run amounts to: its rate, or by Little's law its concurrency."""
    rate = float(row["request_throughput"])
    return rate if name == "request_rate" else rate * float(row["mean_e2el_ms"]) / 1000


def _num_prompts(client: Settings, command: Sequence[str]) -> Any:
    if "num_prompts" in client:
        return client["num_prompts"]
    words = [part for word in command for part in word.split("=", 1)]
    return words[words.index("--num-prompts") + 1] if "--num-prompts" in words else _NUM_PROMPTS


@dataclass(frozen=True, kw_only=True)
class SweepStartupOptions:
    """What is started."""

    startup_cmd: str = option("octavo bench startup", "Command that measures starts.")
    serve_params: str = option("", "JSON file: options of the engine.")
    startup_params: str = option("", "JSON file: options of the benchmark.")


def sweep_startup(
    experiment: ExperimentOptions, options: SweepStartupOptions, say: Callable[[str], None]
) -> Rows:
    """Measure the starts of every combination; the results. Raises OctavoError."""
    place = Experiment(experiment, say)
    rows: Rows = []
    for serve in read_settings(options.serve_params):
        for startup in read_settings(options.startup_params):
            command = applied(applied(shlex.split(options.startup_cmd), serve), startup)
            named = [(kind, name_of(point)) for kind, point in (("SERVE", serve), ("STARTUP", startup))]
            name = "-".join(f"{kind}-{name}" for kind, name in named if name)
            base = place.folder / file_name(name or "default")
            rows += place.measure(base, partial(_with_output, command), [serve, startup])
    place.finish(rows)
    return rows


def _with_output(command: list[str], path: Path) -> list[str]:
    return [*command, "--output-json", str(path)]
