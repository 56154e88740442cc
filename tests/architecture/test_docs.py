"""The documentation tells the truth: commands parse, bodies fit, names, links and quoted errors are there."""

import ast
import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import octavo
from octavo.cli.main import COMMANDS, command_of, make_parser
from octavo.config import EngineArgs
from octavo.config.server import ServerConfig
from octavo.runtime.models.interface import MODELS
from octavo.serving.body import convert
from octavo.serving.registry import Route, WebSocketRoute, load_routes
from tests.docs_pages import ADDRESS, GENERATED, PAGES, ROOT, blocks, commands, read
from tools.docs_site import summary
from tools.gen_models import FAMILIES

COMMAND_LINES = [(block, words) for block, words in commands()]
OTHER_PROGRAMS = {".", "aider", "apt-get", "bash", "claude", "docker", "open-webui", "pip", "uv"}
"""Programs of others, or of the shell, whose command lines are not checked."""
HAND_WRITTEN = [page for page in PAGES if page not in GENERATED]


parser_of = cache(make_parser)


def words_of(program):
    return [(block, words) for block, words in COMMAND_LINES if words[0] == program]


def ids(cases):
    return [f"{block} {' '.join(words)[:60]}" for block, words in cases]


def test_every_command_is_of_a_known_program():
    unknown = {words[0] for _, words in COMMAND_LINES} - OTHER_PROGRAMS
    assert unknown == {"octavo", "make", "curl", "python", "python3"}


@pytest.mark.parametrize(("block", "words"), words_of("octavo"), ids=ids(words_of("octavo")))
def test_octavo_commands_parse(block, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("serve.yaml").write_text("port: 8000\n", encoding="utf-8")
    name = command_of(words[1:])
    parser_of(name).read(words[1 + len(name.split()) :])


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))
    for block, words in words_of("make"):
        assert {word for word in words[1:] if "=" not in word} <= targets, block


def test_python_commands_run_what_is_there():
    for block, words in words_of("python") + words_of("python3"):
        if words[1] == "-m":
            assert importlib.util.find_spec(words[2]), block
        elif words[1].endswith(".py"):
            assert (ROOT / words[1]).is_file(), block


@pytest.mark.parametrize(("block", "words"), words_of("curl"), ids=ids(words_of("curl")))
def test_requests_by_curl_fit_their_routes(block, words):
    url, headers = words[1], "Content-Type: application/json"
    assert url.startswith(ADDRESS), "every page uses one address"
    route = route_of(url.removeprefix(ADDRESS), "POST" if "-d" in words else "GET")
    if "-d" in words:
        assert headers in words
        body = json.loads(words[words.index("-d") + 1])
        convert(body, route.request_model, strict=True)
        with pytest.raises(octavo.RequestError):
            convert(body | {"not_a_field": 1}, route.request_model, strict=True)


def route_of(path, method):
    [route] = [r for r in load_routes() if isinstance(r, Route) and r.path == path and method in r.methods]
    return route


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_python_blocks_use_public_names(block):
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and node.module == "octavo":
            assert {alias.name for alias in node.names} <= set(octavo.__all__)


def test_json_blocks_are_json():
    for block in blocks("json"):
        for line in block.text.splitlines():
            json.loads(line)


def test_the_readme_fits_two_screens_and_its_ten_lines_run(smollm2_path):
    assert len(read("README.md").splitlines()) <= 90
    [block, *_] = blocks("python", ["README.md"])
    assert len([line for line in block.text.splitlines() if line]) <= 10
    done = subprocess.run(
        [sys.executable, "-c", block.text],
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
    named = re.findall(r"`((?:octavo|tests|tools|docs|deploy|examples|\.ci)/[\w./-]+)`", read(page))
    named += [name for name in re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", read(page)) if ":" not in name]
    for name in named:
        assert (ROOT / name).exists() or ((ROOT / page).parent / name).exists(), f"{page} names {name}"


@cache
def source_texts() -> str:
    """All texts of the package as one line each: what stands beside each other in the source is joined."""
    texts = []
    for path in (ROOT / "octavo").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(" ".join(node.value.split()))
            elif isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                texts.append(" ".join("".join(parts).split()))
    return "\n".join(texts)


def is_in_source(quote: str) -> bool:
    """Whether the parts of a quoted error between its … stand in one text of the source, in order."""
    parts = (re.escape(part.strip()) for part in quote.split("…"))
    return re.search(".*".join(parts), source_texts()) is not None


def quotes() -> list[str]:
    return [
        " ".join(quote.split())
        for quote in re.findall(r"^> (.+)$", read("docs/troubleshooting.md"), re.MULTILINE)
    ]


def test_quoted_errors_stand_in_the_source():
    assert len(quotes()) > 25
    assert [quote for quote in quotes() if not is_in_source(quote)] == []


def test_an_error_that_was_reworded_would_be_noticed():
    assert not is_in_source("The queue of the engine is full")
    assert not is_in_source("torch sees … TPUs here")


def mentions(name: str, pages: list[str]) -> bool:
    return any(re.search(rf"(?<![\w/-]){re.escape(name)}(?![\w-])", read(page)) for page in pages)


def test_every_command_is_explained():
    assert [name for name in COMMANDS if not mentions(f"octavo {name}", HAND_WRITTEN)] == []


def test_every_option_is_mentioned_outside_its_table():
    options = [field.name for kind in (EngineArgs, ServerConfig) for field in dataclasses.fields(kind)]
    flags = {name: "--" + name.replace("_", "-") for name in options}
    missing = [
        n for n, flag in flags.items() if not (mentions(flag, HAND_WRITTEN) or mentions(n, HAND_WRITTEN))
    ]
    assert missing == [], "an option belongs into a guide (docs/guides/), not into its table only"


def test_every_route_is_mentioned_outside_its_reference():
    paths = {
        re.sub(r":\w+(?=})", "", route.path)
        for route in load_routes()
        if isinstance(route, WebSocketRoute) or route.documented
    }
    tails = {path: re.sub(r"\{\w+\}", "{id}", path) for path in paths}
    missing = [
        p for p, t in tails.items() if not mentions(t, HAND_WRITTEN) and not mentions(short(t), HAND_WRITTEN)
    ]
    assert missing == [], "a route belongs into docs/server.md or a guide, not into its reference only"


def short(path: str) -> str:
    """As pages shorten it where the beginning was told: …/cancel."""
    return "…/" + path.rpartition("/")[2]


def test_every_architecture_is_in_the_gallery():
    assert set(FAMILIES) <= set(MODELS.names()), "FAMILIES in tools/gen_models.py"
    assert [name for name in MODELS.names() if f"| `{name}` |" not in read("docs/models.md")] == []


def test_every_page_begins_with_what_it_is_about():
    for page in PAGES:
        text = re.sub(r"<!--.*?-->", "", read(page), flags=re.DOTALL)
        assert text.startswith("# "), page
        assert page in ("docs/benchmarks.md",) or len(summary(text)) > 20, page
