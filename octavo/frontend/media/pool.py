"""`PreparationPool`: a few processes that decode and resize files, so that neither time, memory nor a fault
of a decoder is the API process's own. They start with the first file. Called on threads, which wait there.
"""

import fcntl
import queue
import signal
import subprocess
from contextlib import suppress
from typing import Any

import msgspec

from octavo.base.errors import RequestError
from octavo.base.processes import start_helper
from octavo.frontend.media.child import Answer, Question

_MODULE = "octavo.frontend.media.child"
_PIPE_BYTES = 1 << 20


class PreparationPool:
    """Answers as many questions at once as there are processes. Thread-safe."""

    def __init__(self, num_processes: int) -> None:
        self._idle: queue.LifoQueue[_Helper] = queue.LifoQueue()
        for _ in range(num_processes):
            self._idle.put(_Helper())

    def ask(self, question: Question) -> Answer:
        """Return the answer of the next idle process. Raises RequestError for what cannot be prepared."""
        helper = self._idle.get()
        try:
            answer = helper.ask(question)
        finally:
            self._idle.put(helper)
        if answer is None:
            is_late = helper.exit_code == -signal.SIGALRM
            why = (
                f"it took more than {question.limit_s:g} s"
                if is_late
                else "it ended the process that read it"
            )
            raise RequestError(f"Failed to load {question.modality}: {why}.", f"{question.modality}_url")
        if answer.error:
            raise RequestError(answer.error, f"{question.modality}_url")
        return answer

    def close(self) -> None:
        """End the processes that are idle; the others end with their question's thread."""
        with suppress(queue.Empty):
            while True:
                self._idle.get_nowait().close()


class _Helper:
    """One process, started again when it has ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self.exit_code = 0

    def ask(self, question: Question) -> Answer | None:
        """Return None when the process ended instead."""
        if self._process is None:
            self._process, self._end = start_helper(self, _MODULE)
            _widen(self._process.stdin, self._process.stdout)
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        said = msgspec.msgpack.encode(question)
        with suppress(BrokenPipeError):
            process.stdin.write(len(said).to_bytes(8, "little"))
            process.stdin.write(said)
            process.stdin.flush()
        length = process.stdout.read(8)
        content = process.stdout.read(int.from_bytes(length, "little")) if len(length) == 8 else b""
        if not content:
            self.close()
            return None
        return msgspec.msgpack.decode(content, type=Answer)

    def close(self) -> None:
        if (process := self._process) is not None:
            self._process = None
            self._end()
            self.exit_code = process.returncode


def _widen(*pipes: Any) -> None:
    """Have pipes hold a megabyte, where the system lets them: images are not sent in pieces of 64 KiB."""
    for pipe in pipes:
        with suppress(OSError, AttributeError):
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
