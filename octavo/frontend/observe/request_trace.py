"""`RequestTrace`: a line per request in a file: when it came, how long it was, hashes of its blocks. No text.

Mooncake's format, which `octavo bench serve --dataset-name timed_trace` and `octavo tune` replay. Fed by the
output processor; the API processes of a server write into one file. Hashes are keyed by what only the server
knows, so that nobody finds a prompt by trying.
"""

import contextlib
import json
import os
import time
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np

from octavo.base.errors import ConfigError
from octavo.base.log import get_logger
from octavo.config.engine import EngineConfig
from octavo.frontend.requests.open_request import OpenRequest

logger = get_logger(__name__)
BLOCK = 16
"""Tokens that one hash id stands for."""
_HASH_BYTES = 6


def trace_for(config: EngineConfig) -> "RequestTrace | None":
    """A trace if a file is configured. Raises ConfigError for one that cannot be written."""
    path = config.observability.record_trace
    return RequestTrace(Path(path), config.created_s) if path else None


class RequestTrace:
    """Appends to a file; a file older than the engine is emptied first."""

    def __init__(self, path: Path, created_s: float) -> None:
        """created_s: wall time from which the trace's times count, the same in all processes of an engine"""
        self._created_s = created_s
        self._key = blake2b(repr(created_s).encode(), digest_size=32).digest()
        try:
            is_old = path.exists() and path.stat().st_mtime < created_s
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if is_old else 0)
            self._file = os.open(path, flags, 0o600)
        except OSError as error:
            raise ConfigError(f"record_trace {str(path)!r} cannot be written: {error.strerror}.") from error

    def note_end(self, request: OpenRequest, now: float) -> None:
        """A request has had its last output; now: of the monotonic clock. Requests without one are left
        out."""
        output_length = request.stats.max_num_generation_tokens
        if self._file < 0 or not output_length:
            return
        asked = request.asked
        root = asked.spec.cache_identity() + asked.sharing.cache_salt.encode()
        line = {
            "timestamp": round(time.time() - (now - request.stats.arrival_time) - self._created_s, 4),
            "input_length": request.num_prompt_tokens,
            "output_length": output_length,
            "hash_ids": self._hash_ids(asked.prompt_token_ids, root),
        }
        try:
            os.write(self._file, json.dumps(line).encode() + b"\n")
        except OSError as error:
            logger.error("The trace of requests ends here: %s", error)
            self.close()

    def close(self) -> None:
        """Write nothing more. Idempotent."""
        if self._file >= 0:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = -1

    def _hash_ids(self, token_ids: Sequence[int], root: bytes) -> list[int]:
        """One id per block, of the block and all before it."""
        ids, tokens = [], np.asarray(token_ids, dtype=np.int64)
        for start in range(0, len(tokens), BLOCK):
            root = blake2b(
                tokens[start : start + BLOCK].tobytes() + root, key=self._key, digest_size=16
            ).digest()
            ids.append(int.from_bytes(root[:_HASH_BYTES]))
        return ids
