"""`Store`: the server's documents, in one SQLite file used from a thread of its own.

Made by `app`, one per API process; several processes may share the file. Handlers ask it by `run`, so that
no disk is ever waited for on the event loop. What the documents mean is their routes' business.
"""

import asyncio
import fcntl
import os
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from octavo.base.errors import ConfigError
from octavo.base.log import get_logger
from octavo.config.server import ServerConfig
from octavo.serving.store.transaction import PAGE_BYTES, SCHEMA, StoreFull, Transaction

logger = get_logger(__name__)
T = TypeVar("T")
_VERSION = 1
_IN_MEMORY = ":memory:"
_BUSY_MS = 30_000
"""How long a write waits for those of other processes."""
_WINDOW_BYTES = 2**20
_JOURNAL_BYTES = 2**22
"""What is left of the write-ahead log once it has been written back."""
_SPARE_PAGES = 64
"""For the pages that one row splits, and for what evicts and releases."""


class Store:
    """Bounded by the options store_max_bytes and store_max_age: see `Transaction.add`."""

    def __init__(self, config: ServerConfig) -> None:
        """Opened by `open`, or by its first use. An empty path: in memory."""
        self._path = str(Path(config.store).expanduser().absolute()) if config.store else _IN_MEMORY
        self.max_bytes = config.store_max_bytes
        self._max_age_s = config.store_max_age
        self._thread = ThreadPoolExecutor(1, "store")
        self._connection: sqlite3.Connection | None = None
        self._max_pages = 0
        self._is_owner = False
        self._lock: int | None = None

    async def open(self, *, as_owner: bool = False) -> None:
        """Raises ConfigError for a file that cannot be used.

        as_owner: work on what is open in it is done by this process, and refused to others that ask so
        """
        self._is_owner = as_owner
        await self.run(lambda transaction: None)

    async def run(self, work: Callable[[Transaction], T]) -> T:
        """The result of `work`, all of whose changes are kept, or none when it raises."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._transact, work)

    async def windows(self, document_id: str) -> AsyncIterator[list[tuple[int, bytes]]]:
        """The lines of a document with their numbers, some at a time."""
        start = 0
        while lines := await self.run(partial(_window, document_id=document_id, start=start)):
            yield lines
            start = lines[-1][0] + 1

    async def close(self) -> None:
        """Finish what was asked, then let go of the file; may be called twice."""
        await asyncio.to_thread(self._thread.shutdown)
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _transact(self, work: Callable[[Transaction], T]) -> T:
        connection = self._connection = self._connection or self._connect()
        connection.execute("BEGIN IMMEDIATE")
        try:
            transaction = Transaction(connection, self._max_pages)
            transaction.forget_before(time.time() - self._max_age_s)
            result = work(transaction)
            connection.execute("COMMIT")
        except BaseException as error:
            if connection.in_transaction:  # SQLite ends it by itself when the disk is full
                connection.execute("ROLLBACK")
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
                raise StoreFull from error
            raise
        return result

    def _connect(self) -> sqlite3.Connection:
        try:
            if self._path != _IN_MEMORY:
                self._make_file()
            connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            raise self._unusable(error) from error
        try:
            num_empty = _prepare(connection)
            self._max_pages = num_empty + self.max_bytes // PAGE_BYTES
            connection.execute(f"PRAGMA max_page_count = {self._max_pages + _SPARE_PAGES}")
        except sqlite3.Error as error:
            connection.close()
            raise self._unusable(error) from error
        return connection

    def _make_file(self) -> None:
        """For nobody else to read. The lock is the descriptor's: it ends with the process."""
        descriptor = os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600)
        if not self._is_owner:
            os.close(descriptor)
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise ConfigError(f"store: another server works on the file {self._path!r}.") from None
        self._lock = descriptor

    def _unusable(self, error: Exception) -> ConfigError:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        return ConfigError(f"store: the file {self._path!r} cannot be used: {reason}.")


def _prepare(connection: sqlite3.Connection) -> int:
    """Tables, and the settings of a connection: readers and a writer beside each other, no wait for the disk.

    A killed process loses nothing that was committed; a machine without power may lose the last moments.
    Returns how many pages there are before the first row: one for each table and index.
    """
    connection.row_factory = sqlite3.Row
    connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
    connection.execute(f"PRAGMA journal_size_limit = {_JOURNAL_BYTES}")
    connection.execute(f"PRAGMA busy_timeout = {_BUSY_MS}")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA foreign_keys = ON")
    [version] = connection.execute("PRAGMA user_version").fetchone()
    if version not in (0, _VERSION):
        raise sqlite3.DatabaseError(f"it is of version {version}, this octavo reads {_VERSION}")
    connection.execute("BEGIN IMMEDIATE")
    for statement in SCHEMA:
        connection.execute(statement)
    connection.execute(f"PRAGMA user_version = {_VERSION}")
    connection.execute("COMMIT")
    [num_roots] = connection.execute("SELECT count(*) FROM sqlite_schema WHERE rootpage > 0").fetchone()
    return int(num_roots) + 1


def _window(transaction: Transaction, document_id: str, start: int) -> list[tuple[int, bytes]]:
    return transaction.lines(document_id, start, _WINDOW_BYTES)
