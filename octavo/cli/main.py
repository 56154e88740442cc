"""`octavo`: finds the subcommand's module by name and loads only that one; so `octavo --help` is instant.

Errors that octavo raises on purpose end in one line on stderr; status 2 = the user can mend it, 1 = the
engine failed.
"""

import argparse
import os
import sys
from importlib import import_module
from typing import NamedTuple

from octavo.base import log
from octavo.base.bytecode import kept_bytecode
from octavo.base.errors import OctavoError, did_you_mean
from octavo.cli import help_page
from octavo.cli.parser import Parser
from octavo.version import __version__

_INTERRUPTED = 130


class Command(NamedTuple):
    """A subcommand: where it lives and what it does."""

    module: str
    summary: str


COMMANDS = {
    "generate": Command("octavo.cli.generate", "answer one or several prompts, all at once"),
    "serve": Command("octavo.cli.serve", "serve a model over HTTP, with OpenAI's API and a page to chat on"),
    "route": Command("octavo.cli.route", "spread requests over several servers"),
    "scale": Command("octavo.cli.scale", "add replicas to a running server, or drain some"),
    "chat": Command("octavo.cli.chat", "talk to a model in the terminal, here or on a server"),
    "complete": Command("octavo.cli.complete", "continue texts in the terminal, here or on a server"),
    "embed": Command("octavo.cli.embed", "print the vectors of texts"),
    "rerank": Command("octavo.cli.rerank", "print documents in the order in which they fit a query"),
    "run-batch": Command("octavo.cli.run_batch", "answer a file of requests, in OpenAI's batch format"),
    "plan": Command("octavo.cli.plan", "say what memory a model will take, before it is loaded"),
    "quantize": Command("octavo.cli.quantize", "write a model with fewer bits per weight to a file"),
    "snapshot": Command("octavo.cli.snapshot", "keep a model as it lies in memory, for fast starts"),
    "pull": Command("octavo.cli.pull", "bring a model to this machine"),
    "doctor": Command("octavo.cli.doctor", "check whether octavo can run here, and say what to do"),
    "platform-check": Command(
        "octavo.cli.platform_check", "check a device's platform against the references"
    ),
    "bench serve": Command("octavo.cli.bench.serve", "put a load on a server and measure it"),
    "bench latency": Command("octavo.cli.bench.latency", "measure how long a batch takes in a model"),
    "bench throughput": Command("octavo.cli.bench.throughput", "measure what a model computes per second"),
    "bench startup": Command("octavo.cli.bench.startup", "measure how long an engine takes to start"),
    "bench rerank": Command("octavo.cli.bench.rerank", "put a load of queries and documents on a server"),
    "bench sweep serve": Command("octavo.cli.bench.sweep", "measure many configurations of server and load"),
    "bench sweep serve_workload": Command("octavo.cli.bench.sweep_workload", "find latency over throughput"),
    "bench sweep startup": Command("octavo.cli.bench.sweep_startup", "measure many starts"),
    "bench sweep plot": Command("octavo.cli.bench.sweep_plot", "draw the results of a sweep"),
    "bench sweep plot_pareto": Command("octavo.cli.bench.sweep_pareto", "draw its best trade-offs"),
    "tune": Command("octavo.cli.tune", "find the options that suit a workload on this machine"),
    "completion": Command("octavo.cli.completion", "print what completes commands and flags in bash or zsh"),
    "collect-env": Command("octavo.cli.collect_env", "print versions and hardware for a bug report"),
}


_MOST_WORDS = max(len(name.split()) for name in COMMANDS)


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's) and return the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if not (name := command_of(argv)):
        return _top_level(argv)
    try:
        with kept_bytecode():
            return _run(name, argv[len(name.split()) :])
    except OctavoError as error:
        print(f"octavo: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # the reader of our output went away: nothing is left to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def command_of(argv: list[str]) -> str:
    """Return the command that the first words name, the longest there is; "" if they name none."""
    names = (" ".join(argv[:count]) for count in range(_MOST_WORDS, 0, -1))
    return next((name for name in names if name in COMMANDS), "")


def _run(name: str, argv: list[str]) -> int:
    parser = make_parser(name)
    if (word := help_page.asked_for(argv)) is not None:
        help_page.show(parser, word)
        return 0
    args = parser.read(argv)
    log.setup()
    status: int = import_module(COMMANDS[name].module).run(args)
    return status


def make_parser(name: str) -> Parser:
    """Return the parser of a command."""
    module = import_module(COMMANDS[name].module)
    parser = Parser(f"octavo {name}", module.__doc__ or "", getattr(module, "EXAMPLES", ""))
    module.configure(parser)
    return parser


def _top_level(argv: list[str]) -> int:
    """Show the commands, or those whose names begin with the first words, as `octavo bench`."""
    starts = (" ".join(argv[:count]) for count in range(_MOST_WORDS, 0, -1))
    group = next((start for start in starts if any(name.startswith(f"{start} ") for name in COMMANDS)), "")
    known = {name: command for name, command in COMMANDS.items() if name.startswith(group)}
    width = max(map(len, known))
    table = "\n".join(f"  {name:<{width}}  {command.summary}" for name, command in known.items())
    parser = argparse.ArgumentParser(
        prog="octavo",
        usage=" ".join(["octavo", *group.split(), "COMMAND [options]"]),
        description="An inference engine for large language models.",
        epilog=f"commands:\n{table}\n\n`octavo COMMAND --help` explains a command, "
        "--help=WORD a group of options or one of them.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"octavo {__version__}")
    parser.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    args = parser.parse_args(argv[len(group.split()) :][:1])
    if args.command:
        word = f"{group} {args.command}".strip()
        parser.error(f"unknown command {word!r}; known: {', '.join(known)}.{did_you_mean(word, known)}")
    parser.print_help()
    return 0
