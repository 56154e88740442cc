"""Log set-up: stdlib logging, one handler on stderr, a prefix that names the process (engine0, worker1).

A process that serves must not wait for whoever reads its log: after `go_to_background` a thread writes it.
"""

import json
import logging
import queue
import sys
import time
from logging.handlers import QueueHandler, QueueListener
from pathlib import Path

from octavo.base import env
from octavo.base.errors import ConfigError

_ROOT = "octavo"
_MAX_WAITING = 10_000
_LAST_WORDS_S = 1.0


def get_logger(name: str) -> logging.Logger:
    """The logger of a module (`get_logger(__name__)`)."""
    return logging.getLogger(name)


def setup(process_name: str = "") -> None:
    """Send octavo's records to stderr at the level of the environment; called once by each entry point.

    Or do as the file says that the environment names. Raises ConfigError when that cannot be read.
    """
    logger = logging.getLogger(_ROOT)
    path = env.logging_config()
    if path is not None:
        _set_up_from(path)
    if path is not None or logger.handlers:
        return
    prefix = f"{process_name} " if process_name else ""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s %(levelname)s {prefix}%(name)s: %(message)s", "%H:%M:%S")
    )
    logger.addHandler(handler)
    logger.setLevel(env.log_level())
    logger.propagate = False


def setup_if_asked() -> None:
    """`setup` in somebody else's program, where the environment names a level: it asks for lines."""
    if env.log_level_is_given():
        setup()


def go_to_background(*others: str) -> None:
    """From now on a thread writes what was logged; called by processes that serve, after `setup`.

    others: loggers of other packages whose warnings are to be written too
    """
    logger = logging.getLogger(_ROOT)
    for handler in logger.handlers[:]:
        if not isinstance(handler, _Background):
            logger.removeHandler(handler)
            logger.addHandler(_Background(handler))
    for name in others:
        logging.getLogger(name).handlers = logger.handlers[:]
        logging.getLogger(name).setLevel(logging.WARNING)


def flush() -> None:
    """Have all that was logged written, before something else is written to the same place."""
    for handler in logging.getLogger(_ROOT).handlers:
        handler.flush()


class _Background(QueueHandler):
    """Hands records to a thread; when a full pipe holds that up, records are dropped and counted."""

    def __init__(self, handler: logging.Handler) -> None:
        self._waiting: queue.Queue[logging.LogRecord] = queue.Queue(_MAX_WAITING)
        super().__init__(self._waiting)
        self._num_dropped = 0
        QueueListener(self._waiting, handler).start()

    def enqueue(self, record: logging.LogRecord) -> None:
        """Never waits."""
        if self._num_dropped:
            record.msg = f"{record.msg} ({self._num_dropped} records before this one were dropped)"
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            self._num_dropped += 1
        else:
            self._num_dropped = 0

    def flush(self) -> None:
        """At the end of the process, too: let the thread finish, but not for long."""
        deadline = time.monotonic() + _LAST_WORDS_S
        while self._waiting.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.01)


def _set_up_from(path: Path) -> None:
    from logging.config import dictConfig  # takes as long to import as all the rest of this module

    try:
        dictConfig(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, AttributeError, ImportError) as error:
        raise ConfigError(f"The logging configuration {path} cannot be used: {error}") from error
