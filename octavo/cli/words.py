"""The words of the command line before parsing: one spelling of the flags, and `--config FILE` unfolded.

`--max-num-seqs` and `--max_num_seqs` are the same flag. A config file is YAML whose keys are the names of the
flags, sampling and engine alike; what stands on the command line wins.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from octavo.base.errors import ConfigError


def normalise(argv: list[str]) -> list[str]:
    """Write every long flag with hyphens; values, and all that follows a bare `--`, stay as they are."""
    end = argv.index("--") if "--" in argv else len(argv)
    return [_hyphenated(word) for word in argv[:end]] + argv[end:]


def expand_config(argv: list[str]) -> list[str]:
    """Put the entries of `--config FILE` as flags before the others, so that those win."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config")
    end = argv.index("--") if "--" in argv else len(argv)
    path = finder.parse_known_args(argv[:end])[0].config
    return argv if path is None else [*_flags_of(path), *argv]


def _hyphenated(word: str) -> str:
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def _flags_of(path: str) -> list[str]:
    import yaml  # only with --config

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path} cannot be read: {error}") from error
    if content is not None and not isinstance(content, dict):
        raise ConfigError(f"--config {path} must hold `name: value` lines, found a {type(content).__name__}.")
    return [word for name, value in (content or {}).items() for word in _flags_for(str(name), value)]


def _flags_for(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if value is None:
        return []
    if isinstance(value, bool):
        return [flag if value else "--no-" + flag.removeprefix("--")]
    if isinstance(value, list):
        return [f"{flag}={item}" for item in value]
    return [f"{flag}={json.dumps(value) if isinstance(value, dict) else value}"]
