"""What the tuner found: a YAML file for `octavo serve --config`, and the story of the search."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from octavo.base.errors import ConfigError
from octavo.bench.tune.search import Trial


def written(path: Path, model: str, fixed: Mapping[str, Any], best: Trial, story: Iterable[str]) -> None:
    """Write the options of the best point, with the story as a comment. Raises ConfigError."""
    comment = "".join(f"# {line}\n" for line in story)
    options = yaml.safe_dump({"model": model, **fixed, **best.options}, sort_keys=False)
    try:
        path.write_text(comment + options, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {path} cannot be written: {error}") from error


def trial_line(trial: Trial, is_best: bool) -> str:
    """Return a trial in one line."""
    options = " ".join(f"{name}={value}" for name, value in trial.options.items()) or "defaults"
    found = f"failed: {trial.error}" if trial.score is None else f"{trial.median:10.2f}  {trial.bound}-bound"
    times = f"  (the median of {1 + len(trial.again)})" if trial.again else ""
    return f"{'*' if is_best else ' '} {found}  {options}{times}"


def story(default: Trial, best: Trial, unit: str, num_trials: int) -> list[str]:
    """Return what was gained, and what holds the server back before and after."""
    before, after = default.median, best.median
    gain = f", {100 * (after / before - 1):+.1f} %" if before else ""
    lines = [f"{after:.2f} {unit} (defaults: {before:.2f}{gain}); {num_trials} points measured"]
    if default is not best:
        lines += ["with the defaults: " + default.notes[0]] if default.notes else []
    return [*lines, *(line.strip() for line in best.notes)]
