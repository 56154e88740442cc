"""`TemplateProcess`: renders one chat template in a process of its own, which ends when it takes too long.

Used by `chat_template` for templates that nobody has read. The process starts with the first rendering.
"""

import json
import signal
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from octavo.base.processes import start_helper
from octavo.frontend.text.sandbox import RenderError

_MODULE = "octavo.frontend.text.sandbox"


class TemplateProcess:
    """Renders one conversation after the other. Thread-safe."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._exit_code = 0
        """Of the last one that has ended."""
        self._close: Callable[[], object] = lambda: None
        """End the process; may be called twice."""

    def render(self, variables: dict[str, Any], limit_s: float, max_chars: int) -> str:
        """Return what the template writes, at most `max_chars`. Raises RenderError."""
        question = json.dumps([limit_s, max_chars, variables])
        with self._lock:
            answer = self._ask(question)
            if not answer and self._exit_code != -signal.SIGALRM:
                answer = self._ask(question)  # it may have died before, idle
        if not answer and self._exit_code == -signal.SIGALRM:
            raise RenderError(f"The chat template did not come to its end in {limit_s:g} s.")
        if not answer:
            raise RenderError(
                f"The chat template ended the process it runs in (exit code {self._exit_code})."
            )
        text, error = json.loads(answer)
        if error:
            raise RenderError(error)
        return str(text)

    def _ask(self, question: str) -> str:
        """Return the answer; "" when the process has ended instead."""
        process = self._process = self._process or self._start()
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            _tell(process, question)
        answer = process.stdout.readline()
        if not answer:
            self._process = None
            self._close()
            self._exit_code = process.returncode
        return answer

    def _start(self) -> "subprocess.Popen[str]":
        process, self._close = start_helper(self, _MODULE, "ascii")
        _tell(process, json.dumps(self._source))
        return process


def _tell(process: "subprocess.Popen[str]", line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
