"""`Parser`: a command's arguments. A mistake is told in one line, with the nearest name that is right."""

import argparse
from collections.abc import Iterator
from typing import Any, NoReturn

from octavo.base.errors import ConfigError, did_you_mean
from octavo.cli.argv import expand_config, normalise

_UNKNOWN = "unrecognized arguments: "


class Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are ConfigErrors."""

    def __init__(self, prog: str, description: str, examples: str = "") -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=examples and f"examples:\n{examples.rstrip()}",
            formatter_class=_Formatter,
            allow_abbrev=False,
        )

    def read(self, argv: list[str]) -> argparse.Namespace:
        """Parse a command line, and the file that its --config names. Raises ConfigError."""
        words = normalise(argv)
        args = self.parse_intermixed_args(expand_config(words, self.parse_args))
        tag = getattr(args, "model_tag", None)
        by_flag = [word for word in words if word.partition("=")[0] == "--model"]
        if tag and by_flag and args.model != tag:
            raise ConfigError(f"{tag!r} and --model {args.model!r} name two models: give one of them.")
        return args

    def options(self) -> Iterator[argparse.Action]:
        """Those that help shows."""
        return (action for action in self._actions if action.help != argparse.SUPPRESS)

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError instead of leaving the process with the whole usage."""
        if message.startswith(_UNKNOWN):
            word = message.removeprefix(_UNKNOWN).split()[0].partition("=")[0]
            message = f"unexpected argument {word!r}"
            if word.startswith("-"):
                flags = [flag for action in self.options() for flag in action.option_strings]
                message = f"unknown option {word}.{did_you_mean(word, flags)}"
        stop = "" if message.endswith((".", "?")) else "."
        raise ConfigError(f"{message}{stop} `{self.prog} --help=all` lists all options.")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """As argparse's, with the nearest choice."""
        if action.choices is not None and value not in action.choices:
            allowed = f"{value!r} is none of {', '.join(action.choices)}."
            raise argparse.ArgumentError(action, allowed + did_you_mean(str(value), action.choices))


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of descriptions and examples, and gives flags a wide column."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34)
