"""Clients of other projects, unmodified, against a real server: each with a tool, a schema and a stream."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.served_process import ServeProcess

SCRIPTS = sorted(Path(__file__).parents[1].joinpath("clients").glob("*_client.py"))
PYTHON = Path(sys.prefix, "clients", "bin", "python")
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="make test makes the environment of clients")


@pytest.fixture(scope="module")
def server():
    with ServeProcess(program=["-m", "octavo", "serve"]) as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_client(server, script):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(
        [PYTHON, str(script), server.url],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
