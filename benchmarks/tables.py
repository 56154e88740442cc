"""Tables and plot of docs/benchmarks.md, from the records: `python benchmarks/tables.py`. A test checks them.

A table stands between `<!-- KIND RECORD … -->` and `<!-- end -->`; KIND is a function below.
"""

import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, from any folder

from benchmarks.plot import PLOT, RECORD, curves, svg

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
BLOCK = re.compile(r"<!-- (peers|quality|rows|sizes|streams|sums) (.+?) -->\n.*?<!-- end -->", re.DOTALL)
WORK = {
    "W1": "W1 out tok/s",
    "W2": "W2 ms/token",
    "W3": "W3 prefill tok/s",
    "W4": "W4 out tok/s",
    "W5": "W5 out tok/s",
    "start": "start to first token, s",
}
Record = dict[str, Any]


def main() -> int:
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    if drawn := plot():
        PLOT.write_text(drawn, encoding="utf-8")
    return 0


def page(text: str) -> str:
    """The text with every table as its records say."""
    return BLOCK.sub(_filled, text)


def plot() -> str:
    """The plot of the record that the page shows; empty if nothing was measured for it."""
    found = curves(_read(RECORD.stem)["rows"])
    return svg(found) if found else ""


def _filled(block: re.Match[str]) -> str:
    kind, names = block[1], block[2].split()
    lines = _KINDS[kind]([_read(name) for name in names])
    sources = [f"\n`{name}.json`: {source(_read(name))}" for name in names if kind != "streams"]
    return "\n".join([f"<!-- {kind} {block[2]} -->", *lines, *sources, "<!-- end -->"])


def peers(records: list[Record]) -> list[str]:
    """A row per engine, a column per workload, the values that were measured, and what they wrote."""
    found: dict[str, dict[str, list[float]]] = {}
    same: dict[str, str] = {}
    for row in (row for record in records for row in record["rows"]):
        if row.get("workload") in WORK:
            found.setdefault(row["engine"], {}).setdefault(row["workload"], []).extend(row["values"])
        if "same_first_8_tokens" in row:
            same[row["engine"]] = f"{row['same_first_8_tokens']} of {row['requests']}"
    works = [work for work in WORK if any(work in measured for measured in found.values())]
    cells = [
        [name, *(_several(measured.get(work, [])) for work in works), same.get(name, "")]
        for name, measured in found.items()
    ]
    head = ["engine", *(WORK[work] for work in works), "first 8 tokens as above"]
    return _table(head, cells) if same else _table(head[:-1], [row[:-1] for row in cells])


def streams(records: list[Record]) -> list[str]:
    """The plot, if a record has the rows for it."""
    shown = f"![Output tokens per second over the number of streams, a line per engine]({PLOT.name})"
    return [shown] if any(curves(record["rows"]) for record in records) else []


def quality(records: list[Record]) -> list[str]:
    """A row per model and setting."""
    head = [
        "model, setting",
        "positions",
        "perplexity, float32",
        "perplexity",
        "ratio",
        "same greedy token",
    ]
    rows = [
        [
            f"{row['model']}, `{row['setting']}`",
            f"{row['positions']:,}",
            f"{row['perplexity reference']:.3f}",
            f"{row['perplexity']:.3f}",
            f"{row['perplexity ratio']:.4f}",
            f"{row['top-1 agreement']:.2%}",
        ]
        for record in records
        for row in record["rows"]
    ]
    return _table(head, rows)


def rows(records: list[Record]) -> list[str]:
    """The rows as they are, a column per key; what holds several values is left to the record."""
    found = [row for record in records for row in record["rows"]]
    keys = list(dict.fromkeys(key for row in found for key in row if not isinstance(row[key], list)))
    return _table(keys, [[_short(row.get(key, "")) for key in keys] for row in found])


def sizes(records: list[Record]) -> list[str]:
    """What several GPUs do: steps of decoding, requests of mixed lengths, and the share of their sums."""
    found: dict[str, dict[str, str]] = {}
    for row in (row for record in records for row in record["rows"] if "sizes" in row):
        cells = found.setdefault(row["sizes"], {})
        if row["row"] == "decode":
            cells[f"batch {row['batch']}, ms/step"] = _short(row["ms_per_step"])
        elif row["row"] == "mixed":
            cells["mixed, tok/s"] = _short(row["out_tok_s"])
        elif row["row"] == "share":
            cells[f"sums, batch {row['batch']}"] = f"{row['spoken_share']:.0%}"
    found = {name: cells for name, cells in found.items() if cells}
    keys = list(dict.fromkeys(key for cells in found.values() for key in cells))
    return _table(["sizes", *keys], [[name, *(c.get(key, "") for key in keys)] for name, c in found.items()])


def sums(records: list[Record]) -> list[str]:
    """Microseconds of sums over ranks, by the way they are made; with the norm behind them."""
    found = [row for record in records for row in record["rows"] if row["row"] == "sums"]
    ways = ["one", "two", "nccl"]
    keys = [f"{way}{norm}_us" for norm in ("", "_norm") for way in ways]
    head = ["ranks", "KiB", *(f"{way}{norm}, µs" for norm in ("", " + norm") for way in ways)]
    cells = [[_short(row.get(key, "")) for key in ("ranks", *keys)] for row in found]
    return _table(head, [[a, str(r["bytes"] >> 10), *b] for r, (a, *b) in zip(found, cells, strict=True)])


_KINDS = {
    "peers": peers,
    "quality": quality,
    "rows": rows,
    "sizes": sizes,
    "streams": streams,
    "sums": sums,
}


def source(record: Record) -> str:
    """What a record's figures depend on."""
    machine = record["machine"]
    load = f", load before {record['load_before']}" if "load_before" in record else ""
    said = f"{machine['cpu']} ({machine['features'][-1]}), {machine['cores']} cores{load}"
    said += f"; commit {record['commit']}, {record['date'][:10]}."
    return f"{said} {record['note']}".rstrip()


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    rule = ["---", *("--:" for _ in head[1:])]
    return [f"| {' | '.join(cells)} |" for cells in (head, rule, *rows)]


def _several(values: list[float]) -> str:
    """All of them; of more than three, the median and the ends."""
    if len(values) <= 3:
        return ", ".join(map(_short, values))
    median, low, high = map(_short, (statistics.median(values), min(values), max(values)))
    return f"{median} ({low} to {high})"


def _short(value: object) -> str:
    """Three digits of what was measured; counts and words as they are."""
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _read(name: str) -> Record:
    record: Record = json.loads((RECORD.parent / f"{name}.json").read_text(encoding="utf-8"))
    return record


if __name__ == "__main__":
    sys.exit(main())
