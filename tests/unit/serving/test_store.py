"""What the store takes on the disk: no more than it may, whatever is kept in it."""

import sqlite3
from unittest.mock import patch

import pytest

from octavo.config.server import ServerConfig
from octavo.serving.errors import HTTPError
from octavo.serving.store.database import Store

LIMIT = 8_000_000
SLACK = 400_000
"""Tables without a row, and the pages that are kept for evicting."""


@pytest.fixture
async def store(tmp_path):
    store = Store(ServerConfig(store=str(tmp_path / "store"), store_max_bytes=LIMIT))
    yield store
    await store.close()


def taken(tmp_path):
    return (tmp_path / "store").stat().st_size


def add_lines(name, content, count):
    def add(transaction):
        transaction.add("file", name, "", b"{}", is_held=True)
        for number in range(count):
            transaction.write_line(name, number, content)
        transaction.release(name)

    return add


async def test_empty_lines_count_as_what_they_take(store, tmp_path):
    for n in range(2):  # each takes about 5 MB
        await store.run(add_lines(f"file-{n:032x}", b"\n", 50_000))
        assert taken(tmp_path) <= LIMIT + SLACK
    with pytest.raises(HTTPError, match="There is no file"):
        await store.run(lambda transaction: transaction.find("file", f"file-{0:032x}", ""))
    kept = await store.run(lambda transaction: transaction.find("file", f"file-{1:032x}", ""))
    assert kept.num_bytes == 50_000 + len(b"{}")


async def test_a_file_larger_than_the_store_is_refused_and_evicts_nobody(store, tmp_path):
    await store.run(add_lines("small", b"x" * 1000, 100))
    with pytest.raises(HTTPError, match="The store is full") as refused:
        await store.run(add_lines("large", b"x" * 1000, 9000))
    assert refused.value.status == 507
    with pytest.raises(HTTPError, match="The store is full") as again:
        await store.run(add_lines("large", b"x" * 1000, 9000))
    assert again.value is not refused.value, "an error that is raised twice keeps the frames of both"
    await store.run(lambda transaction: transaction.find("file", "small", ""))
    assert taken(tmp_path) <= LIMIT + SLACK


async def test_the_log_of_writes_does_not_stay_large(store, tmp_path):
    await store.run(add_lines("large", b"x" * 100_000, 70))
    for n in range(3):
        await store.run(add_lines(f"small-{n}", b"x", 1))
    assert (tmp_path / "store-wal").stat().st_size <= 5_000_000


async def test_a_full_disk_is_told_and_leaves_the_store_usable(store):
    await store.run(add_lines("first", b"x", 1))
    with patch("octavo.serving.store.transaction.Transaction._make_room"), pytest.raises(HTTPError) as full:
        await store.run(add_lines("large", b"x" * 100_000, 100))  # SQLite's own bound ends it
    assert full.value.status == 507
    assert isinstance(full.value.__cause__, sqlite3.Error)
    await store.run(add_lines("second", b"x", 1))
