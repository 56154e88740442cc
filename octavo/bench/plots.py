"""Drawings of results, with matplotlib (`pip install "octavo[bench]"`); imported when one is asked for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np

from octavo.base.errors import ConfigError

_COLOURS = ("tab:green", "tab:orange", "tab:red")
SCALES = ("linear", "log", "sqrt", "symlog")
Curves = dict[str, list[tuple[float, float, float]]]
"""By name: x, y and the deviation of y."""


@dataclass(frozen=True)
class Style:
    """How a grid looks. labels and scales: of x and y; height: of each part, in inches"""

    labels: tuple[str, str]
    scales: tuple[str, str]
    height: float
    dpi: int


def _figure(inches: tuple[float, float]) -> Any:
    """A figure without a display. inches: wide and high. Raises ConfigError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError('Plots need matplotlib: pip install "octavo[bench]".') from error
    figure = Figure(figsize=inches, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def check_available() -> None:
    """Raise ConfigError without matplotlib; so that it is known before a long run."""
    _figure((6, 4))


def plot_run(result: Mapping[str, Any], path: Path) -> None:
    """Draw a run of `bench serve`: tokens per second, percentiles of latencies, requests over time."""
    figure = _figure((18, 4))
    rate, shares, requests = figure.subplots(1, 3)
    times = _token_times(result)
    seconds = np.bincount(times.astype(int)) if len(times) else np.zeros(1)
    rate.step(range(len(seconds)), seconds, where="post")
    rate.set(title="Output tokens per second", xlabel="s", ylabel="tokens/s")
    values = {"TTFT": result["ttfts"], "ITL": list(chain(*result["itls"])), "E2EL": result["latencies"]}
    for name, seconds_of in values.items():
        if good := [value * 1000 for value in seconds_of if value > 0]:
            shares.plot(np.arange(101), np.percentile(good, np.arange(101)), label=name)
    shares.set(title="Latencies", xlabel="percentile", ylabel="ms", yscale="log")
    shares.legend()
    _draw_requests(requests, result)
    figure.savefig(path)


def plot_timeline(result: Mapping[str, Any], path: Path) -> None:
    """Draw each request as a bar: waiting for the first token, then tokens."""
    figure = _figure((12, 4))
    _draw_requests(figure.subplots(), result)
    figure.savefig(path)


def plot_lengths(result: Mapping[str, Any], path: Path) -> None:
    """Draw how long inputs and outputs were."""
    figure = _figure((12, 4))
    for axes, name in zip(figure.subplots(1, 2), ("input_lens", "output_lens"), strict=True):
        axes.hist(result[name], bins=30)
        axes.set(title=name, xlabel="tokens", ylabel="requests")
    figure.savefig(path)


def plot_grid(grid: Mapping[tuple[str, str], Curves], style: Style, path: Path) -> None:
    """Draw lines with their deviations in a part of the figure per (row, column)."""
    rows, columns = (list(dict.fromkeys(key[axis] for key in grid)) for axis in (0, 1))
    size = (style.height * len(columns), style.height * len(rows))
    figure = _figure(size)
    parts = figure.subplots(len(rows), len(columns), sharex=True, sharey=True, squeeze=False)
    for row, column in product(range(len(rows)), range(len(columns))):
        axes, name = parts[row][column], (rows[row], columns[column])
        curves = grid.get(name, {})
        for label, points in curves.items():
            xs, ys, deviations = np.array(points).T
            axes.plot(xs, ys, marker="o", label=label)
            if deviations.any():
                axes.fill_between(xs, ys - deviations, ys + deviations, alpha=0.2)
        axes.set(title="\n".join(filter(None, name)), xlabel=style.labels[0], ylabel=style.labels[1])
        for set_scale, scale in zip((axes.set_xscale, axes.set_yscale), style.scales, strict=True):
            functions = {"functions": (np.sqrt, np.square)} if scale == "sqrt" else {}
            set_scale("function" if functions else scale, **functions)
        if any(curves):
            axes.legend()
    figure.savefig(path, dpi=style.dpi)


def plot_trade_off(
    points: Sequence[tuple[float, float, str]],
    front: Sequence[tuple[float, float, str]],
    labels: tuple[str, str],
    path: Path,
) -> None:
    """Draw all points, and those that none beats as a line with their labels beside it."""
    figure = _figure((6, 4))
    axes = figure.subplots()
    axes.scatter([x for x, _, _ in points], [y for _, y, _ in points], color="0.5", alpha=0.6, label="runs")
    axes.plot([x for x, _, _ in front], [y for _, y, _ in front], marker="o", label="Pareto curve")
    for x, y, text in front:
        axes.annotate(text, (x, y), fontsize=8)
    axes.set(xlabel=labels[0], ylabel=labels[1])
    axes.grid(linestyle="--", linewidth=0.5, alpha=0.6)
    axes.legend()
    figure.savefig(path)


def _draw_requests(axes: Any, result: Mapping[str, Any]) -> None:
    starts = np.asarray(result["start_times"]) - min(result["start_times"])
    first, whole = np.asarray(result["ttfts"]), np.asarray(result["latencies"])
    rows = np.arange(len(starts))
    axes.barh(rows, first, left=starts, color=_COLOURS[1], label="waits for the first token")
    axes.barh(rows, whole - first, left=starts + first, color=_COLOURS[0], label="tokens come")
    axes.set(title="Requests", xlabel="s", ylabel="request")
    axes.legend()


def _token_times(result: Mapping[str, Any]) -> "np.ndarray[Any, np.dtype[np.float64]]":
    start = min(result["start_times"])
    parts = [
        begun - start + ttft + np.cumsum([0.0, *itl])
        for begun, ttft, itl in zip(result["start_times"], result["ttfts"], result["itls"], strict=True)
        if ttft
    ]
    return np.concatenate(parts) if parts else np.zeros(0)
