"""Throughput over the number of streams, as an SVG: `python benchmarks/plot.py [RECORD] [FILE]`.

Takes the rows Sn that `peers_cpu.py` leaves in a record; a line per engine, its name at its end. Colours are
of middle lightness and there is no background, so that it reads on a light page and on a dark one.
"""

import json
import math
import sys
from collections import defaultdict
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD, PLOT = ROOT / "benchmarks/results/cpu-peers.json", ROOT / "docs/cpu-streams.svg"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 360, 56, 218, 34, 40
COLOURS = ("#2f81f7", "#1a9c8a", "#db6d28", "#a371f7", "#c2609a", "#8a8f00")
GREY = "#808890"
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
    """The picture: streams by their logarithm, of which there are two numbers or more, and tokens from 0."""
    counts = sorted({n for points in lines.values() for n in points})
    highest = max(value for points in lines.values() for value in points.values())
    unit = 10 ** math.floor(math.log10(highest))
    step = next(unit * f for f in (0.1, 0.2, 0.5, 1, 2) if highest / (unit * f) <= 6)
    top = step * math.ceil(highest / step)

    def x(streams: float) -> float:
        width = WIDTH - LEFT - RIGHT
        return round(LEFT + width * math.log2(streams / counts[0]) / math.log2(counts[-1] / counts[0]), 1)

    def y(value: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / top, 1)

    ends = spread({name: y(points[max(points)]) for name, points in lines.items()})
    parts = [text(LEFT - 44, 16, "output tokens per second, all streams together", GREY)]
    for i in range(round(top / step) + 1):
        parts.append(f'<path d="M{LEFT} {y(i * step)}H{WIDTH - RIGHT}" stroke="{GREY}" stroke-opacity=".3"/>')
        parts.append(text(LEFT - 8, y(i * step) + 4, f"{i * step:g}", GREY, "end"))
    parts += [text(x(n), HEIGHT - BOTTOM + 18, str(n), GREY, "middle") for n in counts]
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, "streams at once", GREY, "middle"))
    for (name, points), colour in zip(lines.items(), COLOURS, strict=False):
        path = " ".join(f"{x(n)},{y(value)}" for n, value in points.items())
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x(n)}" cy="{y(v)}" r="3" fill="{colour}"/>' for n, v in points.items()]
        parts.append(text(x(max(points)) + 10, ends[name] + 4, name, colour))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
    head += f'height="{HEIGHT}" font-family="sans-serif" font-size="13">'
    return "\n".join([head, *parts, "</svg>\n"])


def spread(heights: dict[str, float], apart: float = 16) -> dict[str, float]:
    """The same heights, moved down where names would overlap."""
    moved, last = {}, -apart
    for name, height in sorted(heights.items(), key=lambda item: item[1]):
        moved[name] = last = max(height, last + apart)
    return moved


def text(x: float, y: float, words: str, colour: str, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}" text-anchor="{anchor}">{escape(words)}</text>'


if __name__ == "__main__":
    sys.exit(main())
