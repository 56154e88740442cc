"""`Secret`: a key that a request may bear. Only its digest is kept: no log, page or core dump can show it."""

import hashlib
import re
from dataclasses import dataclass
from typing import Self

from octavo.base.errors import ConfigError

_BEARER = re.compile(r"[!-~]+")


@dataclass(frozen=True, repr=False)
class Secret:
    """The sha256 digest of a key."""

    digest: bytes

    @classmethod
    def of(cls, key: str) -> Self:
        """The secret of a key. Raises ConfigError, without the key, for one that no header can carry."""
        if not _BEARER.fullmatch(key):
            raise ConfigError("A key must be one or more printable ASCII characters without spaces.")
        return cls(hashlib.sha256(key.encode()).digest())

    def __repr__(self) -> str:
        return "***"

    @property
    def tenant(self) -> str:
        """The name under which the scheduler and statistics know the bearer."""
        return self.digest.hex()[:16]

    @property
    def cache_salt(self) -> str:
        """What keeps the bearer's cached prompts apart from others'; does not tell the digest."""
        return hashlib.sha256(b"octavo cache salt" + self.digest).hexdigest()
