"""Clients of other projects, unmodified, against a real server: each with a tool, a schema and a stream."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.frontend.text.loader import load_tokenizer
from tests.served_process import ServeProcess

FAST = ("ollama_client",)
SCRIPTS = sorted(Path(__file__).parents[1].joinpath("clients").glob("*_client.py"))
CHOSEN = [
    pytest.param(script, id=script.stem, marks=() if script.stem in FAST else pytest.mark.slow)
    for script in SCRIPTS
]
PYTHON = Path(sys.prefix, "clients", "bin", "python")
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="make test makes the environment of clients")


@pytest.fixture(scope="module")
def server():
    with ServeProcess(program=["-m", "octavo", "serve"]) as server:
        yield server


@pytest.fixture(scope="module")
def tokenizer_folder(smollm2_path, tmp_path_factory):
    """The default model's tokenizer in the form that the transformers library reads."""
    folder = tmp_path_factory.mktemp("tokenizer")
    load_tokenizer(smollm2_path)._backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.mark.parametrize("script", CHOSEN)
def test_client(server, script, tokenizer_folder):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(
        [PYTHON, str(script), server.url, str(tokenizer_folder)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
