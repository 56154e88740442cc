"""Options of one point of a sweep: read from JSON, named, and put into a command line."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.base.errors import ConfigError

Settings = dict[str, Any]
_NAME = "_benchmark_name"


def read_settings(path: str) -> list[Settings]:
    """Return the points of a file: a list of objects, or objects by name; [{}] without a file."""
    if not path:
        return [{}]
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if isinstance(content, dict):
        content = [
            {_NAME: name, **(point if isinstance(point, dict) else {"": point})}
            for name, point in content.items()
        ]
    if (
        not isinstance(content, list)
        or not all(isinstance(p, dict) and "" not in p for p in content)
        or not content
    ):
        raise ConfigError(
            f"{path}: the parameter sweep should be a list of dictionaries, or a dictionary of them."
        )
    names = [point[_NAME] for point in content if _NAME in point]
    if len(set(names)) < len(names):
        raise ConfigError(f"{path}: all {_NAME} values must be unique, found {names}.")
    return content


def name_of(settings: Settings) -> str:
    """Return the name of a point: its own, or its options."""
    return (
        str(settings[_NAME])
        if _NAME in settings
        else "-".join(f"{k}={v}" for k, v in options_of(settings).items())
    )


def options_of(settings: Settings) -> Settings:
    """Return the options of a point without its name."""
    return {name: value for name, value in settings.items() if name != _NAME}


def applied(command: Sequence[str], settings: Settings) -> list[str]:
    """Return a command line in which the options of a point replace its own, or are added."""
    given = {_plain(name): value for name, value in options_of(settings).items()}
    kept, words = [], iter(list(command))
    skips = False
    for word in words:
        if skips and not word.startswith("--"):
            continue
        name = _plain(word.partition("=")[0].removeprefix("--").removeprefix("no-"))
        skips = word.startswith("--") and name in given
        if not skips:
            kept.append(word)
        elif "=" in word:
            skips = False
    return [*kept, *(word for name, value in given.items() for word in _flag(name, value))]


def pairs_of(text: str) -> list[tuple[str, str]]:
    """Return the pairs of "a=b,c=d": options of server and client that must be equal."""
    pairs = [tuple(part.strip() for part in item.split("=")) for item in text.split(",") if item.strip()]
    if any(len(pair) != 2 for pair in pairs):
        raise ConfigError(f"--link-vars {text!r} must look like max_num_seqs=max_concurrency,…")
    return [(pair[0], pair[1]) for pair in pairs]


def are_linked(serve: Settings, client: Settings, pairs: Sequence[tuple[str, str]]) -> bool:
    """Return whether a combination keeps what must be equal equal."""
    return all(a in serve and b in client and serve[a] == client[b] for a, b in pairs)


def file_name(text: str) -> str:
    """Return a text as the name of a file."""
    return text.replace("/", "_").replace("..", "__").strip("'\"")


def _plain(name: str) -> str:
    head, dot, rest = name.partition(".")
    return head.replace("_", "-") + dot + rest


def _flag(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, bool):
        yield f"--{name}={str(value).lower()}" if "." in name else f"--{'' if value else 'no-'}{name}"
        return
    yield f"--{name}"
    yield json.dumps(value) if isinstance(value, Mapping | list) else str(value)
