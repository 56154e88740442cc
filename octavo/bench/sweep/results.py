"""Results of a sweep as rows: read, filtered, put into bins, grouped. Used by `plot`."""

import json
from collections import defaultdict
from collections.abc import Callable
from operator import eq, ge, gt, le, lt, ne
from pathlib import Path
from typing import Any

from octavo.base.errors import ConfigError
from octavo.bench.sweep.experiment import Rows

_SIGNS: dict[str, Callable[[Any, Any], bool]] = {"==": eq, "!=": ne, "<=": le, ">=": ge, "<": lt, ">": gt}


def read_results(folder: Path) -> Rows:
    """Return all results of an experiment. Raises ConfigError when there are none."""
    rows: Rows = [
        row for path in sorted(folder.rglob("summary.json")) for row in json.loads(path.read_text())
    ]
    if not rows:
        raise ConfigError(
            f"{folder} holds no results of a sweep (summary.json in the folders of its points)."
        )
    return rows


def filtered(rows: Rows, conditions: str) -> Rows:
    """Return the rows that fulfil all conditions of "a<=1,b==x"."""
    for condition in words_of(conditions):
        sign = next((sign for sign in _SIGNS if sign in condition), None)
        if sign is None:
            raise ConfigError(f"--filter-by {condition!r} must look like max_concurrency<=1000.")
        name, _, value = (part.strip().strip("'\"") for part in condition.partition(sign))
        if sign in ("==", "!="):
            rows = [row for row in rows if _SIGNS[sign](_comparable(value_of(row, name)), _comparable(value))]
        else:
            limit = _size(value, "filter-by", condition)
            rows = [row for row in rows if _SIGNS[sign](number_of(row, name), limit)]
    return rows


def binned(rows: Rows, bins: str) -> Rows:
    """Return the rows with the fields of "a%10,b%0.5" rounded down to whole bins."""
    for text in words_of(bins):
        name, found, value = (part.strip() for part in text.partition("%"))
        size = _size(value, "bin-by", text) if found else 0.0
        if size <= 0:
            raise ConfigError(f"--bin-by {text!r} must look like request_throughput%1, with a positive size.")
        rows = [{**row, name: number_of(row, name) // size * size} for row in rows]
    return rows


def grouped(rows: Rows, names: str, separator: str = ", ") -> dict[str, Rows]:
    """Return the rows of each combination of the fields "a,b", by its name, as "a=1, b=2"; sorted."""
    groups: dict[tuple[Any, ...], Rows] = defaultdict(list)
    wanted = words_of(names)
    for row in rows:
        groups[tuple(value_of(row, name) for name in wanted)].append(row)
    by_values = sorted(groups, key=lambda values: [(isinstance(v, str), v) for v in map(_comparable, values)])
    return {
        separator.join(f"{name}={value}" for name, value in zip(wanted, values, strict=True)): groups[values]
        for values in by_values
    }


def words_of(text: str) -> list[str]:
    """Return the entries of "a,b"."""
    return [word for part in text.split(",") if (word := part.strip())]


def value_of(row: dict[str, Any], name: str) -> Any:
    """Return a field. Raises ConfigError."""
    if name not in row:
        raise ConfigError(f"The results have no field {name!r}; they have {', '.join(row)}.")
    value = row[name]
    return value if isinstance(value, int | float | str) else json.dumps(value)


def number_of(row: dict[str, Any], name: str) -> float:
    """Return a field that is a number; "inf" is one. Raises ConfigError."""
    try:
        return float(row[name])
    except (KeyError, TypeError, ValueError):
        raise ConfigError(f"The results have no number {name!r}; they have {', '.join(row)}.") from None


def _comparable(value: Any) -> float | str:
    try:
        return float(value)
    except (TypeError, ValueError):
        return str(value)


def _size(text: str, option: str, whole: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"--{option} {whole!r}: {text!r} is no number.") from None
