"""`--output-json`: the result of a benchmark in a file."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.base.errors import ConfigError


def add_output_flag(parser: argparse.ArgumentParser) -> None:
    """Declare the flag."""
    parser.add_argument("--output-json", metavar="FILE", help="Write the result to this file.")


def keep(args: argparse.Namespace, result: Mapping[str, Any]) -> None:
    """Write the result where the flag says. Raises ConfigError."""
    if args.output_json:
        try:
            Path(args.output_json).write_text(json.dumps(result, indent=4), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--output-json {args.output_json} cannot be written: {error}") from error
