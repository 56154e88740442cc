"""The words of the command line before parsing: one spelling of the flags, and `--config FILE` unfolded.

`--max-num-seqs` and `--max_num_seqs` are the same flag. `--hf-overrides.a.b 1` is a part of what
`--hf-overrides '{"a": {"b": 1}}'` says. A config file is YAML whose keys are the names of the
flags, sampling and engine alike; what stands on the command line wins.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from octavo.base.errors import ConfigError
from octavo.cli.units import any_value


def normalise(argv: list[str]) -> list[str]:
    """Write every long flag with hyphens and dotted ones as JSON.

    Values, and all that follows a bare `--`, stay as they are. Raises ConfigError for a dotted flag without
    a value.
    """
    end = argv.index("--") if "--" in argv else len(argv)
    return _joined([_hyphenated(word) for word in argv[:end]]) + argv[end:]


def expand_config(argv: list[str], check: Callable[[list[str]], object] = len) -> list[str]:
    """Put the entries of `--config FILE` as flags before the others, so that those win.

    check: raises ConfigError for an entry, as flags, that is wrong; the error then says where that stands
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config")
    end = argv.index("--") if "--" in argv else len(argv)
    path = finder.parse_known_args(argv[:end])[0].config
    if path is None:
        return argv
    entries = _entries(path)
    for where, words in entries.items():
        try:
            check(words)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
    return [word for words in entries.values() for word in words] + argv


def _hyphenated(word: str) -> str:
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    name, dot, path = name.partition(".")
    return name.replace("_", "-") + dot + path + equals + value


def _joined(words: list[str]) -> list[str]:
    """The parts of dotted flags as one JSON object per flag, after all other words."""
    plain: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    rest = iter(words)
    for word in rest:
        name, equals, text = word.partition("=")
        flag, dot, path = name.partition(".")
        if not (flag.startswith("--") and dot):
            plain.append(word)
            continue
        value = text if equals else next(rest, None)
        if value is None:
            raise ConfigError(f"{name} needs a value.")
        _put(objects.setdefault(flag, {}), path.split("."), any_value(value), name)
    return plain + [f"{flag}={json.dumps(content)}" for flag, content in objects.items()]


def _put(content: dict[str, Any], path: list[str], value: Any, name: str) -> None:
    *parents, last = path
    for parent in parents:
        content = content.setdefault(parent, {})
        if not isinstance(content, dict):
            raise ConfigError(f"{name}: another flag gives {parent} a value that has no parts.")
    content[last] = value


def _entries(path: str) -> dict[str, list[str]]:
    """The entries of a file as flags, by where they stand."""
    import yaml  # only with --config

    try:
        text = Path(path).read_text(encoding="utf-8")
        content, node = yaml.safe_load(text), yaml.compose(text, yaml.SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path} cannot be read: {error}") from error
    if content is not None and not isinstance(content, dict):
        raise ConfigError(f"--config {path} must hold `name: value` lines, found a {type(content).__name__}.")
    lines = {key.value: key.start_mark.line + 1 for key, _ in (node.value if content else ())}
    return {
        f"{path}, line {lines.get(str(name), 1)}, {name}": flags_for(str(name), value)
        for name, value in (content or {}).items()
    }


def flags_for(name: str, value: Any) -> list[str]:
    """An entry of a file as flags; none for null."""
    flag = "--" + name.replace("_", "-")
    if value is None:
        return []
    if isinstance(value, bool):
        return [flag if value else "--no-" + flag.removeprefix("--")]
    if isinstance(value, list):
        return [f"{flag}={item}" for item in value]
    return [f"{flag}={json.dumps(value) if isinstance(value, dict) else value}"]
