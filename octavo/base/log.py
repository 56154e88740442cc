"""Log set-up: stdlib logging, one handler on stderr, a prefix that names the process (engine0, worker1)."""

import logging
import sys

from octavo.base import env

_ROOT = "octavo"


def get_logger(name: str) -> logging.Logger:
    """The logger of a module (`get_logger(__name__)`)."""
    return logging.getLogger(name)


def setup(process_name: str = "") -> None:
    """Send octavo's records to stderr at the level of the environment; called once by each entry point."""
    logger = logging.getLogger(_ROOT)
    if logger.handlers:
        return
    prefix = f"{process_name} " if process_name else ""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s %(levelname)s {prefix}%(name)s: %(message)s", "%H:%M:%S")
    )
    logger.addHandler(handler)
    logger.setLevel(env.log_level())
    logger.propagate = False
