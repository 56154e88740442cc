"""benchmarks/host.py drives parts of the engine by hand: it must not fall behind them unnoticed."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import host

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_it_measures_every_part_that_it_names(smollm2_path):
    command = [sys.executable, "-m", "benchmarks.host", "--requests", "4", "--rounds", "2"]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    column = re.findall(r"^(\w+(?:, \w+)*) {2,}", host.__doc__, re.MULTILINE)
    named = {name for names in column for name in names.split(", ")} | {"schedule", "update"}
    assert {row["part"].split(", ")[0] for row in rows} == named
    for row in rows:
        is_exact = not row["part"].startswith("processes")  # whose times come in ticks
        assert row["requests"] == 4 and row["ms_per_step"] >= (0 if is_exact else -1), row


def test_one_round_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["host", "--rounds", "1"])
    with pytest.raises(SystemExit):
        host.main()
    assert "--rounds must be 2 or more" in capsys.readouterr().err
