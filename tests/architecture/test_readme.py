"""What README.md shows is there: commands, flags, make targets, files, public names."""

import argparse
import ast
import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import octavo
from octavo.cli.argv import expand_config, normalise
from octavo.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "docs/adding.md",
    "docs/architecture.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/architecture/*.md")),
    "docs/cli.md",
    "docs/compatibility.md",
    "docs/install.md",
    "examples/README.md",
]
BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)


def _blocks(language):
    for page in PAGES:
        for found, text in BLOCK.findall((ROOT / page).read_text(encoding="utf-8")):
            if found == language:
                yield page, text


def _commands():
    for _, text in _blocks("sh"):
        for line in text.replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                yield words


def test_the_pages_show_commands():
    shown = {words[1] for words in _commands() if words[0] == "octavo"}
    assert {"generate", "chat", "pull", "doctor"} <= shown
    assert ["make", "run"] in list(_commands())
    assert ["make", "test"] in list(_commands())


@pytest.mark.parametrize("words", [w for w in _commands() if w[0] == "octavo"], ids=" ".join)
def test_octavo_commands_parse(words):
    parser = argparse.ArgumentParser(exit_on_error=False)
    importlib.import_module(COMMANDS[words[1]].module).configure(parser)
    parser.parse_intermixed_args(expand_config(normalise(words[2:])))


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for words in _commands():
        if words[0] == "make":
            assert set(words[1:]) <= targets, words


def test_python_blocks_use_public_names():
    blocks = list(_blocks("python"))
    assert blocks
    for page, text in blocks:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module == "octavo":
                assert {a.name for a in node.names} <= set(octavo.__all__), page


def test_the_ten_lines_run(smollm2_path):
    [(page, text), *_] = _blocks("python")
    assert page == "README.md"
    assert len([line for line in text.splitlines() if line]) <= 10
    done = subprocess.run(
        [sys.executable, "-c", text],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" → ") == 3
    assert "Paris" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    named = re.findall(r"`((?:octavo|tests|tools|docs|\.ci)/[\w./-]+)`", text)
    named += re.findall(r"\]\(([\w./-]+)\)", text)
    for name in named:
        assert (ROOT / name).exists() or ((ROOT / page).parent / name).exists(), f"{page} names {name}"
