"""Files of blocks: whatever is not exactly what its name says is as good as not there."""

import os
import stat
import threading
import time

import pytest

from octavo.base import block_files
from octavo.base.block_files import BlockFiles, BlockName
from octavo.base.errors import ConfigError

KIND, OTHER = b"k" * 32, b"o" * 32
CONTENT = bytes(range(256)) * 4
SIZE = len(CONTENT) + 92


def name(i=0, group=0, rank=0):
    return BlockName(i.to_bytes(32, "big"), group, rank)


def open_files(folder, kind=KIND, max_bytes=1 << 30):
    return BlockFiles(str(folder), kind, max_bytes)


def only_file(folder):
    [path] = [path for path in folder.rglob("*") if path.is_file()]
    return path


def test_what_is_written_is_read(tmp_path):
    files = open_files(tmp_path / "a" / "b")
    assert files.read(name(), len(CONTENT)) is None and not files.has(name())
    assert files.write(name(), CONTENT)
    assert files.has(name()) and files.read(name(), len(CONTENT)) == CONTENT
    again = open_files(tmp_path / "a" / "b")
    assert again.read(name(), len(CONTENT)) == CONTENT
    assert [again.read(other, len(CONTENT)) for other in (name(1), name(0, 1), name(0, 0, 1))] == [None] * 3
    assert open_files(tmp_path / "a" / "b", OTHER).read(name(), len(CONTENT)) is None


def test_nobody_else_may_read(tmp_path):
    before = os.umask(0)
    try:
        open_files(tmp_path / "kv").write(name(), CONTENT)
    finally:
        os.umask(before)
    path = only_file(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o700


def test_a_folder_open_to_others_is_refused(tmp_path):
    open_files(tmp_path).write(name(), CONTENT)
    only_file(tmp_path).parent.chmod(0o755)
    with pytest.raises(ConfigError, match="open to others"):
        open_files(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made"):
        open_files(tmp_path / "file")


def spoil(kind, path, tmp_path):
    whole = path.read_bytes()
    match kind:
        case "empty":
            path.write_bytes(b"")
        case "truncated":
            path.write_bytes(whole[:-1])
        case "longer":
            path.write_bytes(whole + b"x")
        case "a bit":
            path.write_bytes(whole[:500] + bytes([whole[500] ^ 1]) + whole[501:])
        case "the head":
            path.write_bytes(b"X" + whole[1:])
        case "another's":
            open_files(tmp_path).write(name(7), CONTENT)
            path.write_bytes(path.with_name(str(name(7))).read_bytes())
        case "of another kind":
            open_files(tmp_path / "x", OTHER).write(name(), CONTENT)
            path.write_bytes(only_file(tmp_path / "x").read_bytes())
        case "a link":
            path.rename(tmp_path / "elsewhere")
            path.symlink_to(tmp_path / "elsewhere")
        case "a folder":
            path.unlink()
            path.mkdir()


@pytest.mark.parametrize(
    "kind",
    [
        "empty",
        "truncated",
        "longer",
        "a bit",
        "the head",
        "another's",
        "of another kind",
        "a link",
        "a folder",
    ],
)
def test_damage_is_a_miss(tmp_path, kind):
    files = open_files(tmp_path)
    files.write(name(), CONTENT)
    spoil(kind, only_file(tmp_path), tmp_path)
    assert files.read(name(), len(CONTENT)) is None


def test_another_size_is_a_miss(tmp_path):
    files = open_files(tmp_path)
    files.write(name(), CONTENT)
    assert files.read(name(), len(CONTENT) - 1) is None


def test_what_was_not_used_for_longest_gives_way(tmp_path):
    files = open_files(tmp_path, max_bytes=10 * SIZE)
    for i in range(8):
        files.write(name(i), CONTENT)
        os.utime(tmp_path / files._folder / str(name(i)), (i, i))
    assert files.read(name(0), len(CONTENT)), "used now"
    for i in range(8, 30):
        files.write(name(i), CONTENT)
        assert sum(path.stat().st_size for path in tmp_path.rglob("*-*-*")) <= 10 * SIZE
    kept = {i for i in range(30) if files.has(name(i))}
    assert 29 in kept and 1 not in kept and len(kept) >= 8


def test_the_bound_is_for_all_kinds_together(tmp_path):
    for kind in (KIND, OTHER):
        files = open_files(tmp_path, kind, max_bytes=4 * SIZE)
        for i in range(4):
            files.write(name(i), CONTENT)
    assert sum(path.is_file() for path in tmp_path.rglob("*-*-*")) <= 4
    assert not open_files(tmp_path, max_bytes=SIZE - 1).write(name(9), CONTENT), (
        "larger than all there may be"
    )


def test_a_full_disk_is_no_fault(tmp_path, monkeypatch):
    files = open_files(tmp_path)

    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(block_files.os, "open", fail)
    assert not files.write(name(), CONTENT)
    monkeypatch.undo()
    monkeypatch.setattr(block_files.Path, "rename", fail)
    assert not files.write(name(), CONTENT)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()], "nothing is left behind"


def test_what_was_never_finished_is_removed(tmp_path):
    files = open_files(tmp_path)
    files.write(name(), CONTENT)
    folder = only_file(tmp_path).parent
    old, fresh = folder / ".a.new", folder / ".b.new"
    for path in (old, fresh):
        path.write_bytes(b"x")
    os.utime(old, (time.time() - 7200,) * 2)
    open_files(tmp_path).write(name(1), CONTENT)
    assert not old.exists() and fresh.exists()


def test_many_writers_and_readers_of_one_folder(tmp_path):
    """Small bound, everybody writes and removes: readers get a whole content or none."""
    faults = []

    def work(seed):
        files = open_files(tmp_path, max_bytes=6 * SIZE)
        try:
            for i in range(60):
                place = (i * (seed + 1)) % 9
                files.write(name(place), bytes([place]) * 1024)
                found = files.read(name(place), 1024)
                if found not in (None, bytes([place]) * 1024):
                    faults.append(place)
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
