"""`ServerProcess`: a server that a benchmark starts, waits for, and ends with all that it started."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.request import Request, urlopen

from octavo.base import env
from octavo.base.errors import OctavoError

_DEV_MODE = {"VLLM_SERVER_DEV_MODE": "1"}
"""So that caches can be emptied between runs, at a server of either kind."""
_GRACE_S = 20.0
_ENDS = signal.SIGTERM, signal.SIGHUP
_CACHES = ("/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache")


class ServerProcess:
    """Runs from its start to its end as a context manager, in a process group of its own."""

    def __init__(self, command: Sequence[str], log: Path | None, *, ready_timeout_s: float = 300.0) -> None:
        """log: file of what it prints; None: this process's own output"""
        self.command, self.url = list(command), url_of(command)
        self._log, self._ready_timeout_s = log, ready_timeout_s

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_ending_in_order())
            with self._log.open("wb") if self._log else contextlib.nullcontext() as output:
                self.process = subprocess.Popen(
                    self.command,
                    stdout=output,
                    stderr=output and subprocess.STDOUT,
                    env=env.for_child(_DEV_MODE, {}),
                    start_new_session=True,
                )
            stack.callback(self._end)
            self._wait_until_ready()
            self._opened = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()

    def _end(self) -> None:
        """Ask it to end, and after a while kill what is left of its group."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def empty_caches(self) -> None:
        """Have it forget prefixes and the like, so that runs are alike, if it has routes for that."""
        for path in _CACHES:
            with contextlib.suppress(OSError):
                urlopen(Request(self.url + path, method="POST"), timeout=30).close()

    def _wait_until_ready(self) -> None:
        end = time.monotonic() + self._ready_timeout_s
        while not self._is_ready():
            if self.process.poll() is not None:
                raise OctavoError(
                    f"The server ended with exit code {self.process.returncode}: {self.last_words()}"
                )
            if time.monotonic() > end:
                raise OctavoError(f"The server was not ready after {self._ready_timeout_s:g} s.")
            time.sleep(0.1)

    def last_words(self) -> str:
        """The last line that it printed."""
        lines = self._log.read_text(errors="replace").strip().splitlines() if self._log else []
        return lines[-1] if lines else "see its output"

    def _is_ready(self) -> bool:
        try:
            with urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (OSError, ValueError):
            return False


@contextlib.contextmanager
def _ending_in_order() -> Iterator[None]:
    """Signals that would end this process raise SystemExit: a server in a session of its own would go on."""
    is_main = threading.current_thread() is threading.main_thread()
    numbers = [number for number in _ENDS if is_main and signal.getsignal(number) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def url_of(command: Sequence[str]) -> str:
    """Return where a server of this command line will be."""
    values: Mapping[str, str] = {
        word.partition("=")[0]: word.partition("=")[2] or after
        for word, after in zip(command, [*command[1:], ""], strict=True)
    }
    host = values.get("--host", "127.0.0.1")
    reachable = "127.0.0.1" if host == "0.0.0.0" else host
    return f"http://{reachable}:{values.get('--port') or values.get('-p') or 8000}"
