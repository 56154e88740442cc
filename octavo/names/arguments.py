"""vLLM's argument parser and the function that serves: faces of octavo's command line."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from octavo.base.registry import load_object
from octavo.cli import serve
from octavo.cli.argv import expand_config, normalise
from octavo.serving.process.listener import Listener

_SERVER = "octavo.serving.process.main_process:MainProcess"


class FlexibleArgumentParser(argparse.ArgumentParser):
    """A parser of flags with `_` or `-`, of dotted ones (`--flag.key value`) and of `--config FILE`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options.setdefault("allow_abbrev", False)
        super().__init__(*args, **options)

    def parse_known_args(  # type: ignore[override]  # without overloads
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """The words as octavo's own commands read them."""
        words = normalise(list(sys.argv[1:] if args is None else args))
        if "--config" in self._option_string_actions:
            words = expand_config(words)
        return super().parse_known_args(words, namespace)


def make_arg_parser(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Give a parser the flags of `octavo serve`."""
    serve.configure(parser)
    return parser


def validate_parsed_serve_args(args: argparse.Namespace) -> None:
    """Nothing: what cannot work is said before the server loads its model."""


async def run_server(args: argparse.Namespace) -> None:
    """Serve until asked to end, as `octavo serve` with these arguments. Raises what that reports."""
    engine, config = serve.configs(args)
    with Listener.open(config) as listener:
        await load_object(_SERVER)(engine, config, listener).run()
