"""The documentation's code runs: python blocks and requests by curl against a real server, cheap commands.

Blocks for clients of other projects run with `--whole` only, in the environment that `make test` made.
"""

import ast
import importlib.util
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from octavo.cli.main import main
from tests.docs_pages import ADDRESS, PAGES, blocks, commands
from tests.served_process import ServeProcess

CLIENTS = Path(sys.prefix, "clients", "bin", "python")
CHEAP = ("plan smollm2", "doctor", "collect-env", "completion", "pull smollm2")
PYTHON = [
    block for block in blocks("python") if block.page != "README.md"
]  # tests/architecture runs that one


@pytest.fixture(scope="module")
def server(smollm2_path):
    with ServeProcess("--served-model-name", "smollm2", program=["-m", "octavo", "serve"]) as server:
        yield server


def is_foreign(block):
    """Whether it imports what the tests' own environment has not."""
    nodes = ast.walk(ast.parse(block.text))
    names = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    names |= {a.name for n in ast.walk(ast.parse(block.text)) if isinstance(n, ast.Import) for a in n.names}
    return any(importlib.util.find_spec(name.partition(".")[0]) is None for name in names)


OWN = [block for block in PYTHON if not is_foreign(block)]


@pytest.mark.matrix(4)
@pytest.mark.parametrize("page", sorted({block.page for block in OWN}))
def test_the_python_of_a_page(page, request, tmp_path, monkeypatch, capsys):
    """The blocks of a page one after the other, as a reader would paste them into one session."""
    monkeypatch.chdir(tmp_path)
    space = {"__name__": "__main__"}
    try:
        for block in (block for block in OWN if block.page == page):
            text = block.text
            if ADDRESS in text:
                text = text.replace(ADDRESS, request.getfixturevalue("server").url)
            exec(compile(text, str(block), "exec"), space)
        assert capsys.readouterr().out.strip()
    finally:
        for value in space.values():
            for end in ("shutdown", "close"):
                if not isinstance(value, type) and callable(getattr(value, end, None)):
                    with suppress(TypeError):
                        getattr(value, end)()
        space.clear()


@pytest.mark.slow
@pytest.mark.skipif(not CLIENTS.exists(), reason="make test makes the environment of clients")
@pytest.mark.parametrize("block", [block for block in PYTHON if is_foreign(block)], ids=str)
def test_the_python_of_other_clients(block, server):
    done = subprocess.run(
        [CLIENTS, "-c", block.text.replace(ADDRESS, server.url)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip()


def test_requests_by_curl_are_answered(server):
    asked = {json.dumps(words) for _, words in commands() if words[0] == "curl"}
    assert len(asked) > 15
    wrong = []
    for words in map(json.loads, sorted(asked)):
        url = words[1].replace(ADDRESS, server.url)
        if "-d" in words:
            body = json.loads(words[words.index("-d") + 1])
            short = {"max_tokens": 4} if url.endswith("/chat/completions") else {}
            answer = httpx.post(url, json=short | body, timeout=60)
        else:
            answer = httpx.get(url, timeout=60)
        if answer.status_code not in (200, *([404] * is_verb(url))):
            wrong.append((words, answer.text))
    assert not wrong


def is_verb(url):
    """Whether it is an operator's, which a server without keys has not, or one of several models."""
    verbs = "/is_paused", "/is_sleeping", "/get_weight_version", "/weight_info", "/server_info", "/models/sse"
    changes = "/update_weights_from_disk", "load_lora_adapter", "/v1/prefix_cache/pins"
    return url.endswith((*verbs, *changes))


COMMANDS = sorted(
    {" ".join(w[1:]) for _, w in commands() if w[0] == "octavo" and " ".join(w[1:]).startswith(CHEAP)}
    - {f"doctor --url {ADDRESS}"}
)


@pytest.mark.parametrize(
    "line",
    [pytest.param(line, marks=pytest.mark.slow if line == "doctor" else ()) for line in COMMANDS],
)
def test_cheap_commands_run(line, smollm2_path, capsys):
    assert main(line.split()) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.slow
def test_the_batch_of_the_guide(smollm2_path, tmp_path, monkeypatch):
    [block] = blocks("json", ["docs/guides/batches.md"])
    [words] = [
        words
        for found, words in commands()
        if words[:2] == ["octavo", "run-batch"] and "batches" in found.page
    ]
    monkeypatch.chdir(tmp_path)
    Path("requests.jsonl").write_text(block.text, encoding="utf-8")
    assert main(words[1:]) == 0
    assert len(Path("answers.jsonl").read_text(encoding="utf-8").splitlines()) == len(block.text.splitlines())


def test_most_pages_show_something_that_runs():
    assert len({block.page for block in OWN}) >= 8
    assert len(OWN) >= 16
    assert set(PAGES) >= {block.page for block in OWN}
