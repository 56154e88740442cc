"""How answers appear while they grow: three displays for three situations, chosen by `choose`.

`Stream`  one answer: its text as it comes.
`Panel`   several answers on a terminal: a live line per running answer and a bar below; finished ones scroll
up whole.
`Listing` several answers into a file or pipe: each printed when it is complete, in the prompts' order; bar on
stderr.

A model's text is foreign: control characters, which could steer the terminal, never reach one.
"""

import sys
import time
import unicodedata
from typing import TYPE_CHECKING, TextIO

import octavo

if TYPE_CHECKING:
    from rich.console import Group

_REDRAW_S = 0.05
_BAR_WIDTH = 24
_PROMPT_WIDTH = 28


def choose(prompts: list[str], num_answers: int, out: TextIO | None = None) -> "Stream | Panel | Listing":
    """The display that suits `out` (default stdout) and the number of prompts and answers per prompt.

    `update` takes the newest (cumulative) output of a request; request i has the id str(i). `close` ends it.
    """
    out = out or sys.stdout
    if len(prompts) == 1 and num_answers == 1:
        return Stream(out)
    return Panel(prompts, out) if out.isatty() else Listing(prompts, out)


class Stream:
    """One answer, written as it grows."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._shown = 0

    def update(self, output: "octavo.RequestOutput") -> None:
        """Write what is new."""
        text = output.outputs[0].text
        self.write(text[self._shown :])
        self._shown = len(text)

    def write(self, text: str) -> None:
        """Write a piece."""
        self._out.write(_harmless(text, self._out))
        self._out.flush()

    def close(self) -> None:
        """End the line."""
        self._out.write("\n")
        self._out.flush()


class Listing:
    """Several answers, each printed when it and all before it are complete."""

    def __init__(self, prompts: list[str], out: TextIO) -> None:
        from tqdm import tqdm

        self._prompts = prompts
        self._out = out
        self._finished: dict[str, octavo.RequestOutput] = {}
        self._next = 0
        self._bar = tqdm(total=len(prompts), desc="Answers", unit="prompt", disable=None)

    def update(self, output: "octavo.RequestOutput") -> None:
        """Print the finished answers whose turn it is."""
        if not output.finished:
            return
        self._finished[output.request_id] = output
        self._bar.update()
        while (ready := self._finished.get(str(self._next))) is not None:
            self._out.write(_whole(self._next, self._prompts[self._next], ready, self._out))
            self._out.flush()
            self._next += 1

    def close(self) -> None:
        """Close the bar."""
        self._bar.close()


class Panel:
    """Several answers on a terminal: finished ones above, a live line per running one, a bar below."""

    def __init__(self, prompts: list[str], out: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._prompts = prompts
        self._out = out
        self._running: dict[str, octavo.RequestOutput] = {}
        self._num_finished = self._num_tokens = 0
        self._started_s = self._drawn_s = time.monotonic()
        self._live = Live(console=Console(file=out), auto_refresh=False, transient=True)
        self._live.start()

    def update(self, output: "octavo.RequestOutput") -> None:
        """Take in one output; redraw when it is time."""
        from rich.text import Text

        before = self._running.pop(output.request_id, None)
        self._num_tokens += _tokens(output) - (_tokens(before) if before else 0)
        if output.finished:
            self._num_finished += 1
            index = int(output.request_id)
            whole = Text(_whole(index, self._prompts[index], output, self._out))
            self._live.console.print(whole, soft_wrap=True, end="")
        else:
            self._running[output.request_id] = output
        if output.finished or time.monotonic() - self._drawn_s > _REDRAW_S:
            self._live.update(self._drawing(), refresh=True)
            self._drawn_s = time.monotonic()

    def close(self) -> None:
        """Remove the live part."""
        self._live.stop()

    def _drawing(self) -> "Group":
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        columns, rows = self._live.console.size
        running = sorted(self._running.values(), key=lambda output: int(output.request_id))
        lines = [Text(self._line(output, columns - 1)) for output in running[: max(1, rows - 2)]]
        speed = self._num_tokens / max(time.monotonic() - self._started_s, 1e-9)
        done = (
            f"{self._num_finished}/{len(self._prompts)} prompts, {self._num_tokens} tokens, {speed:.0f} tok/s"
        )
        bar = Table.grid(padding=(0, 1))
        bar.add_row(ProgressBar(len(self._prompts), self._num_finished, width=_BAR_WIDTH), Text(done))
        return Group(*lines, bar)

    def _line(self, output: "octavo.RequestOutput", width: int) -> str:
        from rich.cells import cell_len
        from rich.text import Text

        index = int(output.request_id)
        question = Text(_one_line(self._prompts[index]))
        question.truncate(min(_PROMPT_WIDTH, width // 2), overflow="ellipsis")
        label = f"{index + 1}. {question} │ "
        room, answer = width - cell_len(label), _one_line(output.outputs[0].text)
        if cell_len(answer) <= room:
            return label + answer
        end = answer[-room:]
        while cell_len(end) >= room:
            end = end[1:]
        return f"{label}…{end}"


def _whole(index: int, prompt: str, output: "octavo.RequestOutput", out: TextIO) -> str:
    """A finished request as text: the prompt, then its answer or answers."""
    answers = [answer.text.strip() for answer in output.outputs]
    if len(answers) > 1:
        answers = [f"({i + 1}) {answer}" for i, answer in enumerate(answers)]
    return _harmless(f"[{index + 1}] {_one_line(prompt)}\n" + "\n".join(answers) + "\n\n", out)


def _tokens(output: "octavo.RequestOutput") -> int:
    return sum(len(answer.token_ids) for answer in output.outputs)


def _harmless(text: str, out: TextIO) -> str:
    """The text without control characters, when it goes to a terminal."""
    if not out.isatty():
        return text
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")


def _one_line(text: str) -> str:
    return " ".join("".join(c if unicodedata.category(c) != "Cc" else " " for c in text).split())
