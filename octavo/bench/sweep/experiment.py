"""`Experiment`: the folder of a sweep. Runs a command per point, skips what is there, keeps what failed."""

import csv
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from octavo.base.errors import ConfigError, OctavoError
from octavo.bench.sweep.settings import Settings, file_name, options_of
from octavo.config.option import option

Rows = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class ExperimentOptions:
    """Where results go, and how often each point is measured."""

    output_dir: str = option("results", "Folder of experiments.")
    experiment_name: str = option("", "Name of this one (default: the time).")
    num_runs: int = option(3, "Runs per combination.")
    show_stdout: bool = option(False, "Show what the commands print.")
    continue_on_error: bool = option(False, "Record what fails, and go on.")
    dry_run: bool = option(False, "Only print the commands.")
    resume: bool = option(False, "Go on with an experiment: run what has no result yet.")


class Experiment:
    """One sweep's folder and the way to fill it."""

    def __init__(self, options: ExperimentOptions, say: Callable[[str], None]) -> None:
        """Raises ConfigError for a folder that exists, or with `resume` does not."""
        if options.num_runs < 1:
            raise ConfigError("--num-runs must be at least 1.")
        self.options, self.say = options, say
        name = options.experiment_name or datetime.now().strftime("%Y%m%d_%H%M%S")
        self.folder = Path(options.output_dir) / name
        if options.resume and not self.folder.exists():
            raise ConfigError(f"Cannot resume from {self.folder}: there is no such experiment.")
        if not options.resume and self.folder.exists():
            raise ConfigError(f"Cannot overwrite {self.folder}. Give another --experiment-name, or --resume.")

    def log_of(self, name: str) -> Path | None:
        """The file for a command's output; None when it is shown."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return None if self.options.show_stdout else self.folder / f"{file_name(name)}.log"

    def measure(
        self, base: Path, command: Callable[[Path], list[str]], points: Sequence[Settings],
        after: Callable[[], None] = lambda: None,
    ) -> Rows:  # fmt: skip
        """Return the results of a combination's runs, those of an earlier time included.

        command: for the file into which a run writes its result
        points: options that are added to each result
        """
        rows: Rows = []
        for number in range(self.options.num_runs):
            path = base / f"run={number}.json"
            words = command(path)
            self.say(f"{'have' if path.exists() else 'run '} {' '.join(words)}")
            if self.options.dry_run:
                continue
            if not path.exists():
                with self.failures(path.with_suffix(".failure.json")):
                    self.run(words, base)
                    after()
            if path.exists():
                result = json.loads(path.read_text(encoding="utf-8"))
                for point in points:
                    result |= options_of(point)
                rows.append(result | {"run_number": number})
        if rows:
            (base / "summary.json").write_text(json.dumps(rows, indent=4), encoding="utf-8")
        return rows

    def run(self, words: Sequence[str], base: Path) -> None:
        """Run a command. Raises OctavoError when it fails."""
        base.mkdir(parents=True, exist_ok=True)
        output = None if self.options.show_stdout else subprocess.PIPE
        done = subprocess.run(runnable(words), stdout=output, stderr=output, text=True, check=False)
        if done.returncode:
            last = (done.stderr or "").strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
            raise OctavoError(f"{' '.join(words[:4])} … failed: {last[0]}")

    @contextmanager
    def failures(self, path: Path) -> Iterator[None]:
        """Write a failure to `path` and swallow it, if the sweep shall go on."""
        try:
            yield
        except OctavoError as error:
            if not self.options.continue_on_error:
                raise OctavoError(f"{error} `--resume` continues the sweep from here.") from error
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(
                json.dumps({"error_type": type(error).__name__, "error": str(error)}), encoding="utf-8"
            )
            self.say(f"failed: {error}")

    def finish(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the table of all results."""
        if rows:
            names = list(dict.fromkeys(name for row in rows for name in row))
            with (self.folder / "summary.csv").open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, names)
                writer.writeheader()
                writer.writerows(rows)
        self.say(f"{len(rows)} results are in {self.folder}")


def runnable(words: Sequence[str]) -> list[str]:
    """Return a command with `octavo` as this Python's own."""
    return [sys.executable, "-m", *words] if words[0] == "octavo" else list(words)
