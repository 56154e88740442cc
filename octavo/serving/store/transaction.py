"""`Transaction`: what may be done with the store's documents, within one transaction of SQLite.

A document is a record with a content of its own (JSON of whoever keeps it) and, perhaps, numbered lines. It
belongs to a tenant, and is invisible to others. One that is held by somebody's work is never evicted.
"""

import math
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from octavo.serving.errors import HTTPError

Kind = Literal["file", "batch", "response"]

SCHEMA = (
    """CREATE TABLE IF NOT EXISTS document (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        kind TEXT NOT NULL,
        tenant TEXT NOT NULL,
        created_s REAL NOT NULL,
        num_bytes INTEGER NOT NULL,
        num_holders INTEGER NOT NULL DEFAULT 0,
        content BLOB NOT NULL)""",
    "CREATE INDEX IF NOT EXISTS document_age ON document (created_s)",
    "CREATE INDEX IF NOT EXISTS document_list ON document (kind, tenant, number)",
    "CREATE INDEX IF NOT EXISTS document_held ON document (kind, num_holders) WHERE num_holders > 0",
    """CREATE TABLE IF NOT EXISTS line (
        document TEXT NOT NULL REFERENCES document (id) ON DELETE CASCADE,
        number INTEGER NOT NULL,
        content BLOB NOT NULL,
        PRIMARY KEY (document, number))""",
)
PAGE_BYTES = 4096


class StoreFull(HTTPError):
    """There is no room, and nothing that may be evicted."""

    def __init__(self) -> None:
        super().__init__(
            507,
            "The store is full (see --store-max-bytes), and all that is in it in use. Delete files, or try "
            "again when batches are done.",
        )


@dataclass(frozen=True, slots=True)
class Document:
    """One record."""

    id: str
    tenant: str
    num_bytes: int
    """Of its content and its lines."""
    num_holders: int
    content: bytes


class Transaction:
    """Used on the store's thread only."""

    def __init__(self, connection: sqlite3.Connection, max_pages: int) -> None:
        """max_pages: of the file, those of a rowless one included."""
        self._connection = connection
        self._max_pages = max_pages

    def add(
        self, kind: Kind, document_id: str, tenant: str, content: bytes, *, is_held: bool = False
    ) -> None:
        """Keep a new document. Where there is no room, the oldest go that nobody holds.

        Raises HTTPError 507, as all that writes, when that does not help.
        """
        self._make_room(len(content))
        self._connection.execute(
            "INSERT INTO document (id, kind, tenant, created_s, num_bytes, num_holders, content) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (document_id, kind, tenant, time.time(), len(content), int(is_held), content),
        )

    def find(self, kind: Kind, document_id: str, tenant: str) -> Document:
        """Raises HTTPError 404, also for what is somebody else's."""
        row = self._connection.execute(
            "SELECT * FROM document WHERE id = ? AND kind = ? AND tenant = ?", (document_id, kind, tenant)
        ).fetchone()
        if row is None:
            raise HTTPError(404, f"There is no {kind} {document_id[:100]!r}.", f"{kind}_id")
        return _document(row)

    def held(self, kind: Kind) -> list[Document]:
        """Those of all tenants that somebody works on, the oldest first."""
        rows = self._connection.execute(
            "SELECT * FROM document WHERE kind = ? AND num_holders > 0 ORDER BY number", (kind,)
        )
        return [_document(row) for row in rows]

    def page(
        self,
        kind: Kind,
        tenant: str,
        *,
        after: str = "",
        limit: int,
        newest_first: bool = True,
        wanted: Callable[[Document], bool] = lambda document: True,
    ) -> list[Document]:
        """At most `limit` documents behind the one called `after`. Raises HTTPError 404 when that is gone."""
        sign, order = ("<", "DESC") if newest_first else (">", "ASC")
        where, values = "", [kind, tenant]
        if after:
            self.find(kind, after, tenant)
            where, values = f"AND number {sign} (SELECT number FROM document WHERE id = ?)", [*values, after]
        rows = self._connection.execute(
            f"SELECT * FROM document WHERE kind = ? AND tenant = ? {where} ORDER BY number {order}", values
        )
        return list(islice(filter(wanted, map(_document, rows)), limit))

    def replace(self, document_id: str, content: bytes) -> None:
        """Another content."""
        self._make_room(len(content))
        self._change(
            document_id, "num_bytes = num_bytes - length(content) + ?, content = ?", len(content), content
        )

    def hold(self, document_id: str) -> None:
        """Not to be evicted until `release` has been called as often."""
        self._change(document_id, "num_holders = num_holders + 1")

    def release(self, document_id: str) -> None:
        """One fewer needs it."""
        self._change(document_id, "num_holders = num_holders - 1")

    def remove(self, document_id: str) -> None:
        """Forget a document and its lines."""
        self._connection.execute("DELETE FROM document WHERE id = ?", (document_id,))

    def write_line(self, document_id: str, number: int, content: bytes) -> None:
        """Add a line; its end is the writer's."""
        self._make_room(len(content))
        self._connection.execute("INSERT INTO line VALUES (?, ?, ?)", (document_id, number, content))
        self._change(document_id, "num_bytes = num_bytes + ?", len(content))

    def lines(self, document_id: str, start: int, max_bytes: int) -> list[tuple[int, bytes]]:
        """Lines from number `start` on until they have `max_bytes`; one at least, if there is one."""
        rows = self._connection.execute(
            "SELECT number, content FROM line WHERE document = ? AND number >= ? ORDER BY number",
            (document_id, start),
        )
        lines, num_bytes = [], 0
        for number, content in rows:
            lines.append((number, bytes(content)))
            num_bytes += len(content)
            if num_bytes >= max_bytes:
                break
        return lines

    def line_numbers(self, document_id: str) -> set[int]:
        """Which lines there are."""
        rows = self._connection.execute("SELECT number FROM line WHERE document = ?", (document_id,))
        return {number for (number,) in rows}

    def forget_before(self, time_s: float) -> None:
        """Remove what is older and held by nobody."""
        self._connection.execute("DELETE FROM document WHERE created_s < ? AND num_holders = 0", (time_s,))

    def _change(self, document_id: str, change: str, *values: Any) -> None:
        self._connection.execute(f"UPDATE document SET {change} WHERE id = ?", (*values, document_id))

    def _make_room(self, num_bytes: int) -> None:
        """Evict until a content of this size fits, counted in pages: a row takes more than its content."""
        while self._num_pages() + math.ceil(num_bytes / PAGE_BYTES) > self._max_pages:
            evicted = self._connection.execute(
                "DELETE FROM document WHERE id = "
                "(SELECT id FROM document WHERE num_holders = 0 ORDER BY created_s LIMIT 1)"
            )
            if not evicted.rowcount:
                raise StoreFull

    def _num_pages(self) -> int:
        """Those in use, by what this transaction has written, too."""
        [num_pages] = self._connection.execute("PRAGMA page_count").fetchone()
        [num_free] = self._connection.execute("PRAGMA freelist_count").fetchone()
        return int(num_pages - num_free)


def _document(row: sqlite3.Row) -> Document:
    return Document(row["id"], row["tenant"], row["num_bytes"], row["num_holders"], bytes(row["content"]))
