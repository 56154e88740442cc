"""Find the options of a server that suit a workload on this machine, by measuring; write them for `octavo
serve`.

Each point starts a server, puts the workload on it and ends it. The search is over after --time-budget
seconds. What was measured is kept in the --state file: the same command goes on from there.
"""

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.base.cores import usable_cores
from octavo.base.errors import ConfigError
from octavo.bench.backends import BACKENDS
from octavo.bench.data_options import DataOptions
from octavo.bench.load_options import LoadOptions, ReportOptions
from octavo.bench.serve import ServeBench
from octavo.bench.tune.objective import SCORES, ServerObjective
from octavo.bench.tune.report import story, trial_line, written
from octavo.bench.tune.search import Search, State, Trial
from octavo.bench.tune.space import default_space, read_space, without
from octavo.cli.flags import add_engine_flags, add_flags, engine_options, options
from octavo.config.args import EngineArgs
from octavo.config.option import option
from octavo.metrics.nvml import read_gpus

EXAMPLES = """\
  octavo tune smollm2 --input-len 256 --output-len 64 --time-budget 300
  octavo tune org/name --objective goodput --goodput ttft:300 tpot:50 --request-rate 8 --output tuned.yaml
  octavo tune --dataset-name timed_trace --dataset-path trace.jsonl --objective goodput --goodput ttft:500
"""
_FEW_PROMPTS, _WARM_UPS = 64, 4
_LOAD = ("request_rate", "burstiness", "max_concurrency", "backend", "self_timed", "num_warmups")
_UNITS = {"throughput": "output tokens/s", "goodput": "good requests/s"}


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """What is searched for."""

    objective: str = option(
        "throughput",
        "throughput: output tokens per second; goodput: requests per second within the limits of --goodput.",
        choices=tuple(SCORES),
    )
    goodput: list[str] = option(
        [], "Limits in ms: ttft:300 tpot:50 itl:80 e2el:9000 (itl: of 99 in 100 tokens of a request)."
    )
    time_budget: float = option(600.0, "Seconds.")
    state: str = option("tune.json", "File of what was measured.")
    output: str = option("tuned.yaml", "File for `octavo serve --config` with the options found.")
    space: str = option("", 'File of the options to try, as JSON: {"max_num_seqs": [16, 64]}.')
    allow_rounding: bool = option(
        False, "Also try what rounds numbers more and may change texts: 8-bit weights, keys, inputs."
    )


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="The same as --model.")
    add_flags(parser.add_argument_group("TuneOptions", TuneOptions.__doc__), TuneOptions)
    every = {name for name in LoadOptions.__dataclass_fields__ if name not in _LOAD}
    add_flags(parser.add_argument_group("LoadOptions", LoadOptions.__doc__), LoadOptions, without=every)
    add_flags(parser.add_argument_group("DataOptions", DataOptions.__doc__), DataOptions, without=("seed",))
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Search, tell, and write the file."""
    args.model = args.model_tag or args.model or EngineArgs().model
    wanted = TuneOptions(**options(args, TuneOptions))
    fixed = {name: value for name, value in engine_options(args).items() if name != "model"}
    bench = _bench(args, wanted)
    if wanted.space:
        axes = read_space(wanted.space, EngineArgs.__dataclass_fields__)
    else:
        num_gpus = 0 if args.device == "cpu" else len(read_gpus())
        axes = default_space(num_gpus=num_gpus, num_cores=usable_cores(), rounds=wanted.allow_rounding)
    state = State(Path(wanted.state), _question(args.model, fixed, wanted, bench))
    objective = ServerObjective(args.model, fixed, bench, SCORES[wanted.objective])
    search = Search(without(axes, fixed), objective, budget_s=wanted.time_budget, state=state, say=_say)
    best = search.run()
    told = story(search.default, best, _UNITS[wanted.objective], search.num_trials)
    head = f"octavo tune, {time.strftime('%Y-%m-%d %H:%M')}"
    written(Path(wanted.output), args.model, fixed, best, [head, *told])
    print("\n".join(["", *told, "", f"octavo serve --config {wanted.output}"]))
    return 0


def _bench(args: argparse.Namespace, wanted: TuneOptions) -> ServeBench:
    """The workload. Raises ConfigError for options that cannot be."""
    if wanted.objective == "goodput" and not wanted.goodput:
        raise ConfigError("--objective goodput needs limits: --goodput ttft:300 tpot:50.")
    if wanted.time_budget <= 0:
        raise ConfigError("--time-budget must be greater than 0.")
    given = {name: getattr(args, name) for name in _LOAD if getattr(args, name) is not None}
    bench = ServeBench(
        data=DataOptions(**{"num_prompts": _FEW_PROMPTS, **options(args, DataOptions)}),
        load=LoadOptions(**{"num_warmups": _WARM_UPS, **given}, tokenizer=args.tokenizer or args.model),
        report=ReportOptions(goodput=wanted.goodput),
        body={"temperature": 0},
    )
    bench.check()
    if not BACKENDS[bench.load.backend].streams:
        raise ConfigError(f"The tuner measures generated text: --backend {bench.load.backend} makes none.")
    return bench


def _question(model: str, fixed: dict[str, Any], wanted: TuneOptions, bench: ServeBench) -> dict[str, Any]:
    data = {name: value for name, value in vars(bench.data).items() if name != "request_id_prefix"}
    load = {name: str(getattr(bench.load, name)) for name in _LOAD}
    asked = {"objective": wanted.objective, "goodput": wanted.goodput}
    return {"model": model, "fixed": fixed, **asked, "data": data, "load": load}


def _say(trial: Trial, is_best: bool) -> None:
    print(trial_line(trial, is_best), file=sys.stderr, flush=True)
