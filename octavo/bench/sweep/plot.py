"""`bench sweep plot` and `plot_pareto`: drawings of an experiment's results, with vLLM's options."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, TypeVar

from octavo.base.errors import ConfigError
from octavo.bench.plots import SCALES, Curves, Style, plot_grid, plot_trade_off
from octavo.bench.sweep.experiment import Rows
from octavo.bench.sweep.results import binned, filtered, grouped, number_of, read_results, value_of, words_of
from octavo.bench.sweep.settings import file_name
from octavo.config.option import option

_SIZES = ("tensor_parallel_size", "tp"), ("pipeline_parallel_size", "pp"), ("data_parallel_size", "dp")
Point = TypeVar("Point", bound=tuple[Any, ...])


@dataclass(frozen=True, kw_only=True)
class PlotOptions:
    """What is drawn."""

    fig_dir: str = option("", "Folder of the drawings, inside the experiment's.")
    fig_name: str = option("FIGURE", "Beginning of their names.")
    fig_by: str = option("", "Options of which each combination gets a drawing of its own, as a,b.")
    row_by: str = option("", "Options of which each combination gets a row of a drawing.")
    col_by: str = option("", "Options of which each combination gets a column.")
    curve_by: str = option("", "Options of which each combination gets a line.")
    var_x: str = option("total_token_throughput", "Field on the x axis.")
    var_y: str = option("median_ttft_ms", "Field on the y axis.")
    filter_by: str = option("", "Only results for which this holds, as max_concurrency<=1000,…")
    bin_by: str = option("", "Fields rounded down to whole bins, as request_throughput%1,…")
    scale_x: str = option("linear", "Scale of the x axis.", choices=SCALES)
    scale_y: str = option("linear", "Scale of the y axis.", choices=SCALES)
    error_bars: bool = option(True, "Show the standard deviation of results with the same x.")
    fig_height: float = option(6.4, "Height of each part of a drawing, in inches.")
    fig_dpi: int = option(300, "Dots per inch.")
    dry_run: bool = option(False, "Only tell which drawings there would be.")


@dataclass(frozen=True, kw_only=True)
class ParetoOptions:
    """What the Pareto curve is made of."""

    user_count_var: str = option(
        "max_concurrency",
        "Field with the number of users; where it is missing, request_rate, then the most requests at once.",
    )
    gpu_count_var: str = option(
        "", "Field with the number of devices; by default the product of parallel sizes."
    )
    label_by: str = option("max_concurrency,gpu_count", "Fields written beside the points of the curve.")
    dry_run: bool = option(False, "Only tell which drawing there would be.")


def plot_sweep(folder: Path, options: PlotOptions) -> list[Path]:
    """Draw one field over another; the files."""
    if options.fig_height <= 0 or options.fig_dpi < 1:
        raise ConfigError("--fig-height and --fig-dpi must be positive.")
    rows = binned(filtered(read_results(folder), options.filter_by), options.bin_by)
    if not rows:
        raise ConfigError(f"No result fulfils --filter-by {options.filter_by!r}.")
    style = Style((options.var_x, options.var_y), (options.scale_x, options.scale_y),
                  options.fig_height, options.fig_dpi)  # fmt: skip
    files = []
    for name, group in grouped(rows, options.fig_by, "-").items():
        grid = {
            (row, column): _curves(members, options)
            for row, in_row in grouped(group, options.row_by).items()
            for column, members in grouped(in_row, options.col_by).items()
        }
        path = folder / options.fig_dir / file_name("-".join(filter(None, (options.fig_name, name))) + ".png")
        files.append(path)
        if not options.dry_run:
            path.parent.mkdir(parents=True, exist_ok=True)
            plot_grid(grid, style, path)
    return files


def plot_pareto(folder: Path, options: ParetoOptions) -> Path:
    """Draw the best trade-offs between tokens/s per user and tokens/s per device; the file.

    Results that tell no number of users are left out.
    """
    points = []
    for row in read_results(folder):
        if users := _num_users(row, options.user_count_var):
            devices = _num_devices(row, options.gpu_count_var)
            told = {**row, "gpu_count": f"{devices:g}", "user_count_estimate": f"{users:g}"}
            label = "\n".join(f"{n}={value_of(told, n)}" for n in words_of(options.label_by) if n in told)
            rate = number_of(row, "output_throughput")
            points.append((rate / users, rate / devices, label))
    if not points:
        raise ConfigError(f"No result tells how many users there were ({options.user_count_var}).")
    path = folder / "pareto" / "PARETO.png"
    if not options.dry_run:
        path.parent.mkdir(exist_ok=True)
        plot_trade_off(points, pareto_front(points), ("tokens/s per user", "tokens/s per device"), path)
    return path


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """Return the points that no other one beats in both of their first two numbers, by the first."""
    front: list[Point] = []
    for point in sorted(points, reverse=True):
        if not front or point[1] > front[-1][1]:
            front.append(point)
    return front[::-1]


def _curves(rows: Rows, options: PlotOptions) -> Curves:
    """By name: x, mean and standard deviation of the results of each x (0: not to be shown)."""
    curves: Curves = {}
    for label, members in grouped(rows, options.curve_by).items():
        by_x: dict[float, list[float]] = defaultdict(list)
        for row in members:
            by_x[number_of(row, options.var_x)].append(number_of(row, options.var_y))
        shows = options.error_bars
        curves[label] = [
            (x, fmean(ys), stdev(ys) if shows and len(ys) > 1 else 0.0) for x, ys in sorted(by_x.items())
        ]
    return curves


def _num_users(row: dict[str, Any], name: str) -> float:
    """0 if it is not told; a rate without an end is no number of users."""
    for candidate in (name, "request_rate", "max_concurrent_requests"):
        if (value := _given(row, candidate)) and float(value) != float("inf"):
            return float(value)
    return 0.0


def _num_devices(row: dict[str, Any], name: str) -> float:
    if value := name and _given(row, name):
        return float(value)
    return prod(float(next(filter(None, (_given(row, n) for n in names)), 1)) for names in _SIZES)


def _given(row: dict[str, Any], name: str) -> Any:
    return row.get(name) or row.get(name.replace("_", "-"))
