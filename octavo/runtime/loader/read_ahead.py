"""`ReadAhead` brings files into the page cache ahead of whoever reads them through a mapping.

Used by loader/safetensors for `safetensors_load_strategy=prefetch`: a mapping reads a slow or distant disk a
few pages at a time, this reads it in order and in large pieces.
"""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from octavo.base.log import get_logger

_log = get_logger(__name__)

_PIECE = 16 << 20


class ReadAhead:
    """Reads `files` one after the other on a thread, while the context is open."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._read, name="read-ahead", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _read(self) -> None:
        piece = bytearray(_PIECE)
        try:
            for path in self._files:
                with path.open("rb", buffering=0) as file:
                    while not self._is_over.is_set() and file.readinto(piece):
                        pass
        except OSError as error:  # whoever needs the file will say so
            _log.warning("Reading ahead ended: %s", error)
