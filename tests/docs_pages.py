"""The pages of the documentation, their code blocks, and the commands in these."""

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "examples/*.md")
    for path in ROOT.glob(pattern)
    if path.name != "template.md"
)
GENERATED = ("docs/config.md", "docs/metrics.md", "docs/reference/http.md", "docs/reference/python.md")
ADDRESS = "http://127.0.0.1:8000"
"""Of the server, on every page."""
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SEPARATORS = {"&&", "||", "|", ";", "&"}
_FILE = {"<", ">"}


class Block(NamedTuple):
    """A fenced block."""

    page: str
    language: str
    text: str
    line: int

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@cache
def read(page: str) -> str:
    """The text of a page."""
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(language: str, pages: list[str] = PAGES) -> list[Block]:
    """All blocks in a language."""
    return [
        Block(page, language, found[2], read(page).count("\n", 0, found.start()) + 1)
        for page in pages
        for found in _BLOCK.finditer(read(page))
        if found[1] == language
    ]


def commands() -> Iterator[tuple[Block, list[str]]]:
    """Every command of every sh block as words, without variables set before it and files read or written."""
    for block in blocks("sh"):
        for line in block.text.replace("\\\n", " ").splitlines():
            lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
            lexer.whitespace_split = True
            command: list[str] = []
            for word in [*lexer, ";"]:
                if word not in _SEPARATORS:
                    command.append(word)
                elif command:
                    yield block, _bare(command)
                    command = []


def _bare(words: list[str]) -> list[str]:
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    ends = [place for place, word in enumerate(words) if word in _FILE]
    return words[: ends[0]] if ends else words
