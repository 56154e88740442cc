"""`HashChain`: names for the contents of a request's full blocks, each hashed once in the request's life.

The digest of block i is sha256(digest of block i-1, tokens of block i), so equal digests mean equal tokens
from the very beginning. The root holds what else the keys and values depend on, or what must never be shared:
the cache salt, adapters; media enter with the block they begin in. Idea: hash chains of PagedAttention's
automatic prefix caching; sha256 because a collision would show one user another user's text.
"""

from array import array
from collections.abc import Mapping, Sequence
from hashlib import sha256

NOTHING: Mapping[int, bytes] = {}


class HashChain:
    """The digests of one request's full blocks; survives preemption, because the tokens do."""

    __slots__ = ("_block_size", "change", "digests", "identities", "root")

    def __init__(
        self,
        block_size: int,
        salt: str = "",
        extra: bytes = b"",
        change: tuple[int, bytes] = (0, b""),
        identities: Mapping[int, bytes] = NOTHING,
    ) -> None:
        """extra: what all blocks depend on; change: a position, and what blocks from there on depend on

        identities: by number of a block, what those from it on depend on: media that begin there
        """
        encoded = salt.encode("utf-8", "surrogatepass")  # a salt is any string a client sends
        self._block_size = block_size
        self.root = sha256(len(encoded).to_bytes(8, "little") + encoded + extra).digest()
        """Equal for requests that may share at all."""
        self.change, self.identities = change, identities
        self.digests: list[bytes] = []

    @property
    def num_tokens(self) -> int:
        """Return how many tokens the digests cover."""
        return len(self.digests) * self._block_size

    def extend(self, token_ids: Sequence[int]) -> list[bytes]:
        """Hash the full blocks of `token_ids` that are new since the last call; return all digests.

        token_ids: the request's known tokens; may only have grown since the last call.
        """
        size, digests, (position, more) = self._block_size, self.digests, self.change
        digest = digests[-1] if digests else self.root
        for start in range(len(digests) * size, len(token_ids) - size + 1, size):
            change = b"%d" % position + more if start <= position < start + size and position else b""
            tokens = array("q", token_ids[start : start + size]).tobytes()
            digest = sha256(digest + tokens + change + self.identities.get(start // size, b"")).digest()
            digests.append(digest)
        return digests
