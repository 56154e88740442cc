"""deploy/systemd: the unit as systemd's own tools read and judge it."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from octavo.cli.serve import _DEFAULTS

UNIT = (Path(__file__).parents[2] / "deploy/systemd/octavo.service").read_text(encoding="utf-8")
PROGRAM = "/opt/octavo/bin/octavo"
needs_systemd = pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")


def analyze(folder, text, *words):
    file = folder / "octavo.service"
    file.write_text(text.replace(PROGRAM, "/bin/true"), encoding="utf-8")
    done = subprocess.run(["systemd-analyze", *words, file], capture_output=True, text=True, check=False)
    own = [line for line in done.stderr.splitlines() if "octavo.service" in line]
    return done.returncode, done.stdout, own


@needs_systemd
def test_systemd_reads_it(tmp_path):
    assert analyze(tmp_path, UNIT, "verify", "--man=no")[2] == []
    wrong = UNIT.replace("ProtectClock=yes", "ProtectClocks=yes").replace("RestartSec=2", "RestartSec=soon")
    _, _, complaints = analyze(tmp_path, wrong, "verify", "--man=no")
    assert len(complaints) == 2


@needs_systemd
def test_it_may_do_little(tmp_path):
    words = ("security", "--offline=true", "--no-pager", "--threshold=15")
    code, told, _ = analyze(tmp_path, UNIT, *words)
    assert code == 0 and float(re.search(r"exposure level for octavo.service: ([\d.]+)", told)[1]) <= 1.5
    code, _, _ = analyze(tmp_path, re.sub(r"(?m)^(Capability|Restrict|System|Private).*$", "", UNIT), *words)
    assert code != 0


def test_it_waits_for_the_drain_and_starts_again_only_where_that_helps():
    options = dict(line.split("=", 1) for line in UNIT.splitlines() if re.match(r"\w+=", line))
    assert int(options["TimeoutStopSec"]) >= _DEFAULTS["shutdown_timeout"] + 10
    assert options["RestartPreventExitStatus"] == "2 3" and options["KillMode"] == "mixed"
    assert options["ExecStart"] == f"{PROGRAM} serve --config /etc/octavo/serve.yaml"
    folders = re.findall(r"\b(?:OCTAVO_CACHE_DIR|TRITON_CACHE_DIR|HF_HOME)=(\S+)", UNIT)
    assert len(folders) == 3 and all(
        folder.startswith(("/var/cache/octavo", "/var/lib/octavo")) for folder in folders
    )
