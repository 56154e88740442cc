import io
import re

import pytest
from rich.cells import cell_len

from octavo.cli import display
from octavo.cli.display import Listing, Panel, Stream, choose
from octavo.frontend.outputs.request_output import CompletionOutput, RequestOutput


class Terminal(io.StringIO):
    def isatty(self):
        return True


def output(index, text, finished=False, num_tokens=None):
    answer = CompletionOutput(index=0, text=text, token_ids=[0] * (num_tokens or len(text.split())))
    return RequestOutput(
        request_id=str(index),
        prompt=None,
        prompt_token_ids=[1],
        prompt_logprobs=None,
        outputs=[answer],
        finished=finished,
    )


def screen(written):
    """What a terminal shows: knows newline, return, cursor up (A), erase line (2K), colours (m)."""
    lines, row = [""], 0
    for piece in re.split(r"(\x1b\[[?\d;]*[A-Za-z]|\n|\r)", written):
        if piece == "\n":
            row += 1
            if row == len(lines):
                lines.append("")
        elif piece.startswith("\x1b[") and piece.endswith("A"):
            row -= int(piece[2:-1])
            assert row >= 0, "the panel climbed above its own lines"
        elif piece == "\x1b[2K":
            lines[row] = ""
        elif not piece.startswith(("\r", "\x1b[")):
            lines[row] += piece
    while len(lines) > row + 1 and not lines[-1]:
        lines.pop()
    return lines


def test_the_right_display_is_chosen():
    assert isinstance(choose(["a"], 1, Terminal()), Stream)
    assert isinstance(choose(["a"], 1, io.StringIO()), Stream)
    assert isinstance(choose(["a", "b"], 1, Terminal()), Panel)
    assert isinstance(choose(["a"], 2, Terminal()), Panel)
    listing = choose(["a", "b"], 1, io.StringIO())
    assert isinstance(listing, Listing)
    listing.close()


def test_a_stream_writes_only_what_is_new():
    out = io.StringIO()
    stream = Stream(out)
    for text in ("He", "Hello", "Hello", "Hello!"):
        stream.update(output(0, text))
    stream.close()
    assert out.getvalue() == "Hello!\n"


def test_control_characters_never_reach_a_terminal():
    evil = "a\x1b]0;title\x07b\x9b2Jc\td\ne"
    for out, expected in ((Terminal(), "a]0;titleb2Jc\td\ne\n"), (io.StringIO(), evil + "\n")):
        stream = Stream(out)
        stream.update(output(0, evil))
        stream.close()
        assert out.getvalue() == expected


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setattr(display, "_REDRAW_S", -1.0)
    for name, value in {"COLUMNS": "60", "LINES": "5", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    return Terminal()


def test_a_panel_shows_running_answers_and_keeps_finished_ones(terminal):
    panel = Panel(["first question", "second question"], terminal)
    panel.update(output(0, "one"))
    panel.update(output(1, "uno"))
    assert screen(terminal.getvalue())[:2] == ["1. first question │ one", "2. second question │ uno"]
    panel.update(output(1, "uno dos", finished=True))
    shown = screen(terminal.getvalue())
    assert shown[:4] == ["[2] second question", "uno dos", "", "1. first question │ one"]
    assert shown[4].startswith("━━━━━━━━━━━━╺━━━━━━━━━━━ 1/2 prompts, 3 tokens")
    panel.update(output(0, "one two", finished=True))
    panel.close()
    assert screen(terminal.getvalue()) == [
        "[2] second question",
        "uno dos",
        "",
        "[1] first question",
        "one two",
        "",
        "",
    ]


def test_a_panel_never_outgrows_the_terminal(terminal):
    prompts = [f"a rather long question number {i} 日本語日本語" for i in range(9)]
    panel = Panel(prompts, terminal)
    for step in range(1, 4):
        for i in range(9):
            panel.update(output(i, "words 日本 and more of them " * step))
    lines = screen(terminal.getvalue())
    assert len([line for line in lines if "│" in line]) == 3
    for line in lines:
        if "│" in line:
            assert cell_len(line) < 60
            assert line.endswith("and more of them")


def test_a_listing_prints_in_order_whatever_finishes_first(capsys):
    out = io.StringIO()
    listing = Listing(["a", "b\nc"], out)
    listing.update(output(1, "late", finished=True))
    listing.update(output(0, "growing"))
    assert out.getvalue() == ""
    listing.update(output(0, "grown", finished=True))
    listing.close()
    assert out.getvalue() == "[1] a\ngrown\n\n[2] b c\nlate\n\n"
