"""`BlockFiles`: blocks of keys and values as files of a folder that engines share.

Written by workers, read by engine cores. A file's name says what is in it, and its head says it again, with
length and checksum: whatever is not exactly that is as good as not there. So engines need no lock: a file
appears whole or not at all (rename), may vanish at any time, and never changes. Nobody but the owner may read
what prompts left behind.
"""

import os
import struct
import time
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple
from zlib import crc32

from octavo.base.errors import ConfigError
from octavo.base.log import get_logger
from octavo.base.ownership import is_private

logger = get_logger(__name__)

_HEAD = struct.Struct("<8s32s32sIIQI")
_MAGIC = b"octavo1\n"
_PARTS = 16
"""The folder is looked through whenever so large a part of its bound has been written."""
_STALE_S = 3600.0
_TEMPORARY = ".new"


class BlockName(NamedTuple):
    """digest: of all tokens up to the block's end; group: of layers; rank: whose heads."""

    digest: bytes
    group: int
    rank: int

    def __str__(self) -> str:
        return f"{self.digest.hex()}-{self.group}-{self.rank}"


class BlockFiles:
    """The blocks of one kind in a folder. Methods may be called on any thread."""

    def __init__(self, folder: str, fingerprint: bytes, max_bytes: int) -> None:
        """fingerprint: 32 bytes, equal where blocks may be exchanged; max_bytes: of all kinds together.

        Raises ConfigError when the folder cannot be made, or is open to others.
        """
        self._root = Path(folder)
        self._folder = self._root / f"octavo-{fingerprint.hex()[:32]}"
        self._fingerprint = fingerprint
        self._max_bytes = max_bytes
        self._bytes_until_look = 0
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder.mkdir(mode=0o700, exist_ok=True)
            state = self._folder.lstat()
        except OSError as error:
            raise ConfigError(f"shared_storage_path: {self._folder} cannot be made: {error}.") from error
        if not is_private(state):
            raise ConfigError(
                f"shared_storage_path: {self._folder} belongs to somebody else or is open to others; prompts "
                "could be read there. Make it yours alone (chmod 700), or name another folder."
            )

    def has(self, name: BlockName) -> bool:
        """Whether there is such a file; it may turn out to be damaged, or vanish."""
        return os.path.exists(self._folder / str(name))  # noqa: PTH110  # Path.exists raises more, costs more

    def read(self, name: BlockName, num_bytes: int) -> bytes | None:
        """The content, of exactly `num_bytes`; None when it is not there or not sound. It counts as used."""
        path = self._folder / str(name)
        try:
            with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
                if os.fstat(file.fileno()).st_size != _HEAD.size + num_bytes:
                    return None
                head, content = file.read(_HEAD.size), file.read(num_bytes)
                if head != self._head(name, content):
                    logger.warning("%s is damaged, and left alone.", path)
                    return None
                os.utime(file.fileno())
        except OSError:
            return None
        return content

    def write(self, name: BlockName, content: bytes) -> bool:
        """Keep a content, unless it is there; False when disk or bound do not take it."""
        path = self._folder / str(name)
        num_bytes = _HEAD.size + len(content)
        if num_bytes > self._max_bytes or self.has(name):
            return num_bytes <= self._max_bytes
        self._make_room(num_bytes)
        temporary = path.with_name(f".{token_hex(8)}{_TEMPORARY}")
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(temporary, flags, 0o600), "wb") as file:  # noqa: PTH123  # a descriptor
                file.write(self._head(name, content))
                file.write(content)
            temporary.rename(path)
        except OSError as error:
            logger.warning("%s cannot be written: %s", path, error)
            temporary.unlink(missing_ok=True)
            return False
        return True

    def clear(self) -> None:
        """Remove the blocks of this kind, whoever wrote them."""
        for entry in os.scandir(self._folder):
            Path(entry.path).unlink(missing_ok=True)  # another engine may be faster

    def _head(self, name: BlockName, content: bytes) -> bytes:
        return _HEAD.pack(
            _MAGIC, self._fingerprint, name.digest, name.group, name.rank, len(content), crc32(content)
        )

    def _make_room(self, num_bytes: int) -> None:
        """Now and then: remove what was not used for longest, until a part of the bound is free."""
        self._bytes_until_look -= num_bytes
        if self._bytes_until_look >= 0:
            return
        part = max(self._max_bytes // _PARTS, num_bytes)
        files = sorted(_files(self._root))
        total = sum(size for _, size, _ in files)
        for _, size, path in files:
            if total + part <= self._max_bytes:
                break
            Path(path).unlink(missing_ok=True)
            total -= size
        self._bytes_until_look = part - num_bytes


def _files(root: Path) -> list[tuple[float, int, str]]:
    """(time of last use, bytes, path) of all blocks; those that were never finished are removed."""
    found = []
    for folder in root.glob("octavo-*"):
        for entry in os.scandir(folder) if folder.is_dir() else ():
            try:
                state = entry.stat(follow_symlinks=False)
                if entry.name.endswith(_TEMPORARY) and time.time() - state.st_mtime > _STALE_S:
                    Path(entry.path).unlink(missing_ok=True)
                else:
                    found.append((state.st_mtime, state.st_size, entry.path))
            except FileNotFoundError:
                continue  # another engine was faster
    return found
