"""`Identities`: digests of contents. Of those that came before, the digest is found by comparing them.

Called by `MediaReader`, on threads. Memory compares several times as fast as it is hashed.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from typing import Any

import numpy as np

from octavo.base.lru import LRU

_SAMPLES, _ENDS = 512, 16
_ENTRY_BYTES = 2048
"""What an entry takes beside its content, at most about."""
_Parts = tuple[bytes | str, ...]
_Sample = tuple[object, ...]


class Identities:
    """Keeps contents beside their digests, the latest of those alike in a few places. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._known: LRU[_Sample, tuple[_Parts, bytes]] = LRU(max_bytes)
        self._lock = threading.Lock()

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._known.clear()

    def find(self, parts: _Parts, salt: str) -> bytes | None:
        """Return the digest of what is equal in every byte; None if it has not come before with this salt."""
        with self._lock:
            known = self._known.get(_sample(parts, salt))
        return known[1] if known is not None and known[0] == parts else None

    def of(self, parts: _Parts, salt: str, make: Callable[..., bytes]) -> bytes:
        """Return the digest of a content, by `make(*parts)` if it is new."""
        if (found := self.find(parts, salt)) is None:
            found = make(*parts)
            with self._lock:
                self._known.put(_sample(parts, salt), (parts, found), _ENTRY_BYTES + sum(map(len, parts)))
        return found


def _sample(parts: _Parts, salt: str) -> _Sample:
    return salt, *((len(part), part[:: 1 + len(part) // _SAMPLES], part[-_ENDS:]) for part in parts)


def digest(*parts: bytes) -> bytes:
    """Return the SHA-256 of parts and of their lengths."""
    made = sha256()
    for part in parts:
        made.update(len(part).to_bytes(8, "little"))
        made.update(part)
    return made.digest()


def parts_of(content: Any) -> Iterator[bytes]:
    """Give what tells a content from others: a file's bytes, or an object's pixels or samples."""
    if isinstance(content, bytes | bytearray):
        yield b"file"
        yield bytes(content)
        return
    if hasattr(content, "tobytes") and hasattr(content, "mode"):  # Pillow's
        yield f"{content.mode} {content.size}".encode()
        yield content.tobytes()
        yield repr(content.getpalette() if content.mode == "P" else None).encode()
        return
    if isinstance(content, list | tuple):  # of frames, perhaps with what is known of them
        for part in content:
            is_plain = isinstance(part, Mapping | int | float)
            yield from [repr(part).encode()] if is_plain else parts_of(part)
        return
    array = np.asarray(content)
    yield f"{array.dtype.str} {array.shape}".encode()
    yield np.ascontiguousarray(array).tobytes()
