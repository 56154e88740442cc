"""Throughput over the number of streams, as an SVG: `python benchmarks/plot.py [RECORD] [FILE]`.

Takes the rows Sn that `peers_cpu.py` leaves in a record; a line per engine, its name at its end. Colours are
of middle lightness and there is no background, so that it reads on a light page and on a dark one.
"""

import io
import json
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
RECORD, PLOT = ROOT / "benchmarks/results/cpu-peers.json", ROOT / "docs/cpu-streams.svg"
COLOURS = ("#2f81f7", "#1a9c8a", "#db6d28", "#a371f7", "#c2609a", "#8a8f00")
GREY = "#808890"
NAMES_APART = 0.055
"""Least distance between two names, as a part of the height."""
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "octavo", "font.family": "sans-serif", "font.size": 10}
Curves = dict[str, dict[int, float]]


def main() -> int:
    record, plot = [Path(word) for word in sys.argv[1:]] or (RECORD, PLOT)
    plot.write_text(svg(curves(json.loads(record.read_text(encoding="utf-8"))["rows"])), encoding="utf-8")
    return 0


def curves(rows: list[dict[str, object]]) -> Curves:
    """Of every engine: streams → median tokens per second."""
    found: Curves = defaultdict(dict)
    for row in rows:
        work = str(row.get("workload", ""))
        if work[:1] == "S" and work[1:].isdigit():
            found[str(row["engine"])][int(work[1:])] = float(str(row["median"]))
    return {name: dict(sorted(points.items())) for name, points in found.items()}


def svg(lines: Curves) -> str:
    """The picture as a file; the same text for the same lines."""
    text = io.StringIO()
    with mpl.rc_context(STYLE):
        picture(lines).savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return text.getvalue()


def picture(lines: Curves) -> Figure:
    """Streams by their logarithm, and tokens from 0."""
    figure = Figure(figsize=(7.9, 3.75), layout="constrained")
    axes = figure.add_subplot()
    for (name, points), colour in zip(lines.items(), COLOURS, strict=False):
        axes.plot([*points], [*points.values()], color=colour, marker="o", markersize=5, label=name)
    axes.set_xscale("log", base=2)
    streams = sorted({number for points in lines.values() for number in points})
    axes.set_xticks(streams, [str(number) for number in streams])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("streams at once", color=GREY)
    axes.set_title("output tokens per second, all streams together", color=GREY, loc="left", fontsize=10)
    axes.tick_params(colors=GREY, length=0)
    axes.grid(axis="y", color=GREY, alpha=0.3)
    axes.spines[:].set_visible(False)
    ends = [points[max(points)] for points in lines.values()]
    for line, height in zip(axes.lines, _spread(ends, axes.get_ylim()[1]), strict=True):
        place = axes.get_yaxis_transform()  # x: parts of the width, y: tokens per second
        axes.text(1.0, height, line.get_label(), color=line.get_color(), transform=place, va="center")
    return figure


def _spread(heights: list[float], top: float) -> list[float]:
    """The same heights, moved down where names would overlap."""
    moved, last = [0.0] * len(heights), 2 * top
    for number in sorted(range(len(heights)), key=lambda number: -heights[number]):
        moved[number] = last = min(heights[number], last - NAMES_APART * top)
    return moved


if __name__ == "__main__":
    sys.exit(main())
