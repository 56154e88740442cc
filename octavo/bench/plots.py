"""Drawings of results, with matplotlib (`pip install "octavo[bench]"`); imported when one is asked for."""

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from octavo.base.errors import ConfigError

_COLOURS = ("tab:green", "tab:orange", "tab:red")


def _figure(columns: int, rows: int = 1) -> Any:
    """A figure without a display. Raises ConfigError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError('Plots need matplotlib: pip install "octavo[bench]".') from error
    figure = Figure(figsize=(6 * columns, 4 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def check_available() -> None:
    """Raise ConfigError without matplotlib; so that it is known before a long run."""
    _figure(1)


def plot_run(result: Mapping[str, Any], path: Path) -> None:
    """Draw a run of `bench serve`: tokens per second, percentiles of latencies, requests over time."""
    figure = _figure(3)
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
    figure = _figure(2)
    _draw_requests(figure.subplots(), result)
    figure.savefig(path)


def plot_lengths(result: Mapping[str, Any], path: Path) -> None:
    """Draw how long inputs and outputs were."""
    figure = _figure(2)
    for axes, name in zip(figure.subplots(1, 2), ("input_lens", "output_lens"), strict=True):
        axes.hist(result[name], bins=30)
        axes.set(title=name, xlabel="tokens", ylabel="requests")
    figure.savefig(path)


def plot_curves(
    curves: Mapping[str, Sequence[tuple[float, float]]], labels: tuple[str, str], path: Path
) -> None:
    """Draw a line of (x, y) points per name."""
    figure = _figure(1)
    axes = figure.subplots()
    for name, points in curves.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
    axes.set(xlabel=labels[0], ylabel=labels[1])
    if any(curves):
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
    """When each chunk came, in seconds after the first request was sent."""
    start = min(result["start_times"])
    parts = [
        begun - start + ttft + np.cumsum([0.0, *itl])
        for begun, ttft, itl in zip(result["start_times"], result["ttfts"], result["itls"], strict=True)
        if ttft
    ]
    return np.concatenate(parts) if parts else np.zeros(0)
