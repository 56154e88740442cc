"""`bench sweep plot` and `plot_pareto`: drawings of an experiment's results."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from octavo.base.errors import ConfigError
from octavo.bench.plots import plot_curves
from octavo.bench.sweep.experiment import Rows
from octavo.bench.sweep.serve import read_results
from octavo.bench.sweep.settings import file_name
from octavo.config.option import option

_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class PlotOptions:
    """What is drawn."""

    fig_dir: str = option("", "Folder of the drawings, inside the experiment's.")
    fig_name: str = option("FIGURE", "Beginning of their names.")
    fig_by: str = option("", "Options of which each combination gets a drawing of its own, as a,b.")
    curve_by: str = option("", "Options of which each combination gets a line.")
    var_x: str = option("total_token_throughput", "Field on the x axis.")
    var_y: str = option("median_ttft_ms", "Field on the y axis.")
    filter_by: str = option("", "Only results for which this holds, as max_concurrency<=1000,…")


@dataclass(frozen=True, kw_only=True)
class ParetoOptions:
    """What the Pareto curve is made of."""

    user_count_var: str = option("max_concurrency", "Field with the number of users.")
    gpu_count_var: str = option(
        "", "Field with the number of devices; by default the product of parallel sizes."
    )
    label_by: str = option("", "Options of which each combination gets a line.")


def plot_sweep(folder: Path, options: PlotOptions) -> list[Path]:
    """Draw one field over another; the files."""
    rows = [row for row in read_results(folder) if _holds(row, options.filter_by)]
    files = []
    for name, group in _groups(rows, options.fig_by).items():
        curves = {
            label: _averaged([(_number(row, options.var_x), _number(row, options.var_y)) for row in members])
            for label, members in _groups(group, options.curve_by).items()
        }
        files.append(
            folder / options.fig_dir / file_name(f"{options.fig_name}{f'-{name}' if name else ''}.png")
        )
        files[-1].parent.mkdir(parents=True, exist_ok=True)
        plot_curves(curves, (options.var_x, options.var_y), files[-1])
    return files


def plot_pareto(folder: Path, options: ParetoOptions) -> Path:
    """Draw the best trade-offs between tokens/s per user and tokens/s per device; the file."""
    curves = {
        label: pareto_front([_per_user_and_device(row, options) for row in members])
        for label, members in _groups(read_results(folder), options.label_by).items()
    }
    path = folder / "PARETO.png"
    plot_curves(curves, ("tokens/s per user", "tokens/s per device"), path)
    return path


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """Return the points that no other one beats in both, by x."""
    front: list[Point] = []
    for point in sorted(points, reverse=True):
        if not front or point[1] > front[-1][1]:
            front.append(point)
    return front[::-1]


def _per_user_and_device(row: dict[str, Any], options: ParetoOptions) -> Point:
    users = row.get(options.user_count_var) or row.get("max_concurrent_requests") or 1
    devices = 1.0
    for name in _SIZES:
        devices *= float(row.get(name) or row.get(name.replace("_", "-")) or 1)
    if options.gpu_count_var:
        devices = _number(row, options.gpu_count_var)
    rate = _number(row, "output_throughput")
    return rate / float(users), rate / devices


def _averaged(points: Sequence[Point]) -> list[Point]:
    """Runs of the same x as one point."""
    by_x: dict[float, list[float]] = defaultdict(list)
    for x, y in points:
        by_x[x].append(y)
    return [(x, mean(values)) for x, values in sorted(by_x.items())]


def _groups(rows: Rows, names: str) -> dict[str, Rows]:
    groups: dict[str, Rows] = defaultdict(list)
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for row in rows:
        groups[", ".join(f"{name}={row.get(name)}" for name in wanted)].append(row)
    return groups


def _number(row: dict[str, Any], name: str) -> float:
    try:
        return float(row[name])
    except (KeyError, TypeError, ValueError):
        raise ConfigError(f"The results have no number {name!r}; they have {', '.join(row)}.") from None


def _holds(row: dict[str, Any], conditions: str) -> bool:
    """Whether a result fulfils "a<=1,b==x"."""
    for condition in filter(None, conditions.split(",")):
        for sign in ("<=", ">=", "==", "!=", "<", ">"):
            name, found, value = condition.partition(sign)
            if found:
                break
        else:
            raise ConfigError(f"--filter-by {condition!r} must look like max_concurrency<=1000.")
        if sign in ("==", "!="):
            is_met = (str(row.get(name.strip())) == value.strip()) == (sign == "==")
        else:
            have, limit = _number(row, name.strip()), float(value)
            is_met = {"<": have < limit, "<=": have <= limit, ">": have > limit, ">=": have >= limit}[sign]
        if not is_met:
            return False
    return True
