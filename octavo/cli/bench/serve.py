"""Put a load on an OpenAI-compatible server and measure it, with the flags and the result of `vllm bench
serve`.

Requests are sent at their times, whatever the server does (open loop). TTFT is the time to the first token,
TPOT the time per token after it, ITL the time between two, E2EL the whole request.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from octavo.base.errors import ConfigError
from octavo.bench import plots, report
from octavo.bench.data_options import DataOptions
from octavo.bench.load_options import LoadOptions, ReportOptions, SamplingOptions
from octavo.bench.serve import ServeBench
from octavo.bench.serve import run as measure
from octavo.cli.flags import add_flags, options

EXAMPLES = """\
  octavo bench serve --num-prompts 200 --request-rate 8 --goodput ttft:300 tpot:50
  octavo bench serve --backend openai-chat --dataset-name sharegpt --dataset-path sharegpt.json
  octavo bench serve --dataset-name timed_trace --dataset-path trace.jsonl --save-result
"""
KINDS = (DataOptions, LoadOptions, SamplingOptions, ReportOptions)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    for kind in KINDS:
        add_flags(parser.add_argument_group(kind.__name__, kind.__doc__), kind)


def read_bench(args: argparse.Namespace) -> ServeBench:
    """Return the benchmark that arguments ask for. Raises ConfigError."""
    if args.self_timed is not None and args.dataset_name != "timed_trace":
        raise ConfigError("--self-timed/--no-self-timed is only supported with --dataset-name=timed_trace.")
    body = options(args, SamplingOptions)
    extra = body.pop("extra_body", {})
    return ServeBench(
        data=DataOptions(**options(args, DataOptions)),
        load=LoadOptions(**options(args, LoadOptions)),
        report=ReportOptions(**options(args, ReportOptions)),
        body=body | extra,
    )


def run(args: argparse.Namespace) -> int:
    """Run the benchmark and print its table; status 1 when a request failed."""
    bench = read_bench(args)
    if bench.report.plot or bench.report.plot_timeline or bench.report.plot_dataset_stats:
        plots.check_available()
    result = measure(bench)
    for error in report.first_errors(result):
        print(f"failed: {error}", file=sys.stderr)
    print(report.table(result))
    keep(bench, result)
    return int(result["failed"] > 0)


def keep(bench: ServeBench, result: dict[str, Any]) -> None:
    """Write the files that were asked for, and say where they are. Raises ConfigError."""
    asked, files = bench.report, []
    try:
        if asked.save_result or asked.append_result:
            files.append(report.save(bench, result))
        if asked.plot:
            files.append(Path(asked.plot))
            plots.plot_run(result, files[-1])
        beside = report.file_of(bench, result)
        for is_asked, draw, ending in (
            (asked.plot_timeline, plots.plot_timeline, ".timeline.png"),
            (asked.plot_dataset_stats, plots.plot_lengths, ".dataset_stats.png"),
        ):
            if is_asked:
                files.append(beside.with_suffix(ending))
                draw(result, files[-1])
    except (OSError, ValueError) as error:
        raise ConfigError(f"The result cannot be written: {error}") from error
    for path in files:
        print(f"written: {path}", file=sys.stderr)
