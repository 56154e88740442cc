"""Answer a file of requests without a server: a JSON object per line, in and out in OpenAI's batch format.

Results are written as they come, failed ones too, each with the custom_id of its request. Started again after
an interruption, with the same files, it does what is left. Exit status 1: some requests failed.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec
from tqdm import tqdm

from octavo.base.errors import ConfigError
from octavo.cli.flags import add_engine_flags, add_foreign_flags, engine_args, foreign_options
from octavo.config import EngineArgs, resolve
from octavo.config.compat import translate
from octavo.config.foreign import SERVER
from octavo.config.server import ServerConfig
from octavo.frontend.async_engine import AsyncLLM
from octavo.serving.caller import Caller
from octavo.serving.engines import Engines
from octavo.serving.openai import batch_lines

_TASKS_PER_SEAT = 2
"""So that a request waits when another one ends."""

EXAMPLES = """\
  octavo run-batch --model org/name -i requests.jsonl -o results.jsonl
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("files", nargs="*", metavar="FILE", help="The same as -i and -o.")
    parser.add_argument("-i", "--input-file", default="", metavar="FILE", help="Requests, one a line.")
    parser.add_argument("-o", "--output-file", default="", metavar="FILE", help="Where results are appended.")
    parser.add_argument(
        "--lora-modules", nargs="+", action="extend", metavar="NAME", help="As those of octavo serve."
    )
    add_foreign_flags(parser, SERVER)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Answer what has no answer yet; a word about it goes to stderr."""
    source, target = _paths(args)
    config = ServerConfig(lora_modules=args.lora_modules or [])
    translate(foreign_options(args, SERVER), (), {}, SERVER)  # refuses what matters
    custom_ids = _check(source)
    with _open_output(target) as output:
        results = _Results(output, {result.custom_id for result in _read_results(output, target)})
        if foreign := results.done - custom_ids:
            raise ConfigError(
                f"{target} has results of other requests ({min(foreign)!r:.50}): choose another file."
            )
        num_skipped = len(results.done)
        results.bar = tqdm(
            total=len(custom_ids), initial=num_skipped, desc="Requests", unit="request", disable=None
        )
        with results.bar:
            if num_skipped < len(custom_ids):
                asyncio.run(_answer_all(engine_args(args), config, source, results))
    print(
        f"{results.num_good} requests answered, {results.num_bad} failed, {num_skipped} were done before: "
        f"{target}",
        file=sys.stderr,
    )
    return 1 if results.num_bad else 0


@dataclass(slots=True)
class _Results:
    """The output file, and what has been written to it."""

    file: BinaryIO
    done: set[str]
    """custom_ids of before."""
    bar: "tqdm[object]" = field(init=False)
    num_good: int = 0
    num_bad: int = 0

    def add(self, result: batch_lines.LineResult) -> None:
        """Write one; it is in the file, should the process be killed now."""
        self.file.write(msgspec.json.encode(result) + b"\n")
        self.file.flush()
        self.num_good += result.is_good
        self.num_bad += not result.is_good
        self.bar.update()


async def _answer_all(args: EngineArgs, config: ServerConfig, source: Path, results: _Results) -> None:
    engine = AsyncLLM(resolve(args), on_crash="replay")
    try:
        await engine.start()
        seats = asyncio.Semaphore(_TASKS_PER_SEAT * engine.config.scheduler.max_num_seqs)
        engines = Engines(engine, config)
        await engines.adapters.load_modules()

        async def answer(number: int, line: batch_lines.BatchLine) -> None:
            caller = Caller(engines, config, f"line-{number}", "", "", {})
            results.add(await batch_lines.answer_line(caller, line))

        async with asyncio.TaskGroup() as group:
            for number, line in _read_lines(source):
                if line.custom_id not in results.done:
                    await seats.acquire()
                    group.create_task(answer(number, line)).add_done_callback(lambda _: seats.release())
    except ExceptionGroup as faults:
        raise faults.exceptions[0] from None
    finally:
        await engine.shutdown()


def _paths(args: argparse.Namespace) -> tuple[Path, Path]:
    given = [name for name in (args.input_file, args.output_file) if name] + args.files
    if len(given) != 2:
        raise ConfigError("Give two files, as in: octavo run-batch -i in.jsonl -o out.jsonl")
    source, target = Path(given[0]), Path(given[1])
    if not source.is_file():
        raise ConfigError(f"There is no file {str(source)!r}.")
    if target.exists() and target.samefile(source):
        raise ConfigError("Input and output are the same file.")
    return source, target


def _check(source: Path) -> set[str]:
    """The custom_ids of all requests. Raises ConfigError for a line that is none."""
    names: set[str] = set()
    for number, line in _read_lines(source):
        if line.custom_id in names:
            raise ConfigError(
                f"{source}, line {number}: another line has the custom_id {line.custom_id!r:.50}."
            )
        names.add(line.custom_id)
    return names


def _read_lines(source: Path) -> Iterator[tuple[int, batch_lines.BatchLine]]:
    """Requests with the numbers of their lines, from 1 on."""
    with source.open("rb") as lines:
        for number, content in enumerate(lines, 1):
            try:
                if content.strip():
                    yield number, batch_lines.read_line(content)
            except batch_lines.LineFault as fault:
                raise ConfigError(f"{source}, line {number}: {fault}") from None


def _open_output(target: Path) -> BinaryIO:
    try:
        return os.fdopen(os.open(target, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
    except OSError as error:
        raise ConfigError(f"The output {str(target)!r} cannot be written: {error.strerror}.") from error


def _read_results(output: BinaryIO, target: Path) -> Iterable[batch_lines.LineResult]:
    """Those of an earlier run; a line that it was killed in is cut off. Leaves the file at its end."""
    results, end = [], 0
    for line in output:
        if not line.startswith(batch_lines.RESULT_BEGINS[: len(line)]):
            raise ConfigError(f"{target} is there already and holds no results: choose another file.")
        if line.endswith(b"\n"):
            results.append(msgspec.json.decode(line, type=batch_lines.LineResult))
            end += len(line)
    output.seek(end)
    output.truncate()
    return results
