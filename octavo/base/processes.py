"""Child processes: started without pickle or fork, watched while they live, gone when their parent is.

Called by the front for the engine core and by the multiprocess executor for its ranks; knows neither of them.
"""

import ctypes
import faulthandler
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import psutil

from octavo.base import env

_PARENT_POLL_S = 0.25
_LAST_WORDS_S = 1.5
_PR_SET_PDEATHSIG = 1
_DUMP_SIGNAL = signal.SIGUSR1


def python_command(module: str, *arguments: str) -> list[str]:
    """Return `python -m module arguments…`; what lies in the current directory does not shadow modules."""
    return [sys.executable, "-P", "-m", module, *arguments]


def child_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables of a child that imports, and keeps bytecode, where this process does."""
    given = {"PYTHONPATH": os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)}
    if sys.pycache_prefix and not sys.dont_write_bytecode:
        given |= {"PYTHONPYCACHEPREFIX": sys.pycache_prefix, "PYTHONDONTWRITEBYTECODE": ""}
    return env.for_child(given, more or {})


def start_helper(
    owner: object, module: str, encoding: str | None = None
) -> tuple["subprocess.Popen[Any]", Callable[[], object]]:
    """Start a process that answers through its pipes; return it and what ends it, as `owner`'s end does.

    encoding: of what is said; None = bytes
    """
    process = subprocess.Popen(
        python_command(module),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding=encoding,
        process_group=0,  # Ctrl-C is not meant for it
        env=child_environment(),
    )
    return process, weakref.finalize(owner, _end_helper, process)


def _end_helper(process: "subprocess.Popen[Any]") -> None:
    process.kill()
    process.communicate()


class Child:
    """`python -m module arguments… PID-of-this-process`, with this process's import path and standard error.

    Its standard output goes to standard error, it has no standard input. `on_exit` gets the exit code
    (negative: the signal) as soon as the process ends, on a thread of its own. `inherited_fds` are open in it
    under the same numbers.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        on_exit: Callable[[int], None],
        environment: Mapping[str, str] | None = None,
        inherited_fds: Sequence[int] = (),
    ) -> None:
        words = *arguments, str(os.getpid())
        self._process = _told(module, words) or subprocess.Popen(
            python_command(module, *words),
            stdin=subprocess.DEVNULL,
            stdout=2,
            env=child_environment(environment),
            pass_fds=inherited_fds,
        )
        self._watcher = threading.Thread(
            target=lambda: on_exit(self._process.wait()), name=f"watch-{module}", daemon=True
        )
        self._watcher.start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._process.terminate()

    def end(self, grace_s: float) -> None:
        """Wait up to `grace_s` for the process to end by itself, then kill it; returns when it is gone."""
        self._watcher.join(grace_s)
        if self._watcher.is_alive():
            self._process.kill()
            self._watcher.join()


_ahead: dict[str, "subprocess.Popen[bytes]"] = {}
"""Processes that wait for the arguments of the next `Child`, by module."""


def start_ahead(module: str) -> None:
    """Start the process of a module's next `Child`, without arguments: they will come by standard input.

    It ends by itself if this process does without.
    """
    command = python_command(module)
    _ahead[module] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=2, env=child_environment())


def _told(module: str, words: Sequence[str]) -> "subprocess.Popen[bytes] | None":
    process = _ahead.pop(module, None)
    if process is not None and process.stdin is not None:
        with suppress(OSError):  # it has died: whoever watches it will hear of that
            process.stdin.write("\0".join(words).encode())
            process.stdin.close()
    return process


def leave(code: int) -> NoReturn:
    """End this process now, whatever its threads do.

    What was logged and printed goes out first, unless whoever reads it does not: Python's own way out would
    wait for him.
    """

    def flush() -> None:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # None where it was closed from the start
                stream.flush()

    flushing = threading.Thread(target=flush, daemon=True)
    flushing.start()
    flushing.join(_LAST_WORDS_S)
    os._exit(code)


def tell_stacks_when_asked() -> None:
    """In a child: write the stacks of all threads to standard error at `dump_stacks`, and before a crash."""
    faulthandler.enable()
    faulthandler.register(_DUMP_SIGNAL, all_threads=True)


def dump_stacks(pid: int) -> None:
    """Have a process that promised it, and its children, write their stacks. A stopped one cannot."""
    for process in _family(pid):
        with suppress(psutil.Error):
            process.send_signal(_DUMP_SIGNAL)


def cpu_seconds(pid: int, module: str = "") -> list[float]:
    """CPU time that a process and its children have used so far; those that have ended do not count.

    Behind it that of each child that runs `module` alone, in the order of their ids.
    """
    total_s, own_s = 0.0, {}
    for process in _family(pid):
        with suppress(psutil.Error):
            times = process.cpu_times()
            total_s += times.user + times.system
            if module and module in process.cmdline():
                own_s[process.pid] = times.user + times.system
    return [total_s, *(own_s[child] for child in sorted(own_s))]


def end_with_threads(on_error: Callable[[Exception], None]) -> None:
    """In a child: `on_error` gets, on its thread, an exception that ends a thread; it ends the process."""

    def report(arguments: threading.ExceptHookArgs) -> None:
        error = arguments.exc_value
        on_error(error if isinstance(error, Exception) else RuntimeError(f"A thread ended: {error!r}"))

    threading.excepthook = report


def _family(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.Error:
        return []


def die_with_parent(parent_pid: int, last_act: Callable[[], None]) -> None:
    """End this process within half a second of its parent's end, however that came; `last_act` runs before.

    Looks at the parent's id instead of being killed by PR_SET_PDEATHSIG: that signal comes when the *thread*
    that started this process ends, and as SIGKILL it would leave no time for `last_act`. It is used to wake
    this process up, should it be stopped at that moment.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(_PARENT_POLL_S)
        try:
            last_act()
        finally:
            os._exit(1)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()
