"""`Pins`: beginnings that stay in the cache until their time is over, whatever else wants their blocks.

Owned by the scheduler. A pin holds blocks as a request does, so the pool knows nothing of it. All pins hold
at most a share of the blocks. Requests that finish may leave one behind (soft); operators make firm ones,
which give way to no soft one. Where nothing could run otherwise, even firm pins go, the least first.
Retention by priority and seconds, begun anew when used, is SGLang's and TensorRT-LLM's idea.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from octavo.base.errors import RequestError
from octavo.engine.kvcache.block_pool import NULL_BLOCK
from octavo.engine.kvcache.manager import KVCacheManager
from octavo.engine.kvcache.prefix import HashChain
from octavo.engine.kvcache.table import BlockTable, SharedPrefix
from octavo.messages.request import Retention


@dataclass(slots=True, eq=False)
class Pin:
    """One beginning. blocks: of all groups, each once"""

    digest: bytes
    table: BlockTable
    blocks: frozenset[int]
    num_tokens: int
    retention: Retention
    until_s: float

    @property
    def worth(self) -> tuple[bool, int, float]:
        """Return the order in which pins give way, the least first."""
        return self.retention.is_firm, self.retention.priority, self.until_s


class Pins:
    """All pins of one engine."""

    def __init__(self, kv: KVCacheManager, share: float, clock: Callable[[], float]) -> None:
        """share: of the usable blocks that pins may hold; clock: in seconds."""
        self._kv = kv
        self._clock = clock
        self._share = share
        self._pins: dict[bytes, Pin] = {}
        """By the digest of the last block."""
        self._next_end_s = inf
        self.num_blocks = 0
        """Held by all pins, each block counted once."""

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def most_blocks(self) -> int:
        """Return how many blocks all pins may hold together."""
        return int(self._share * self._kv.num_usable_blocks)

    def all(self) -> list[Pin]:
        """Return those whose time is not over, the least first."""
        self.expire()
        return sorted(self._pins.values(), key=lambda pin: pin.worth)

    def keep(self, chain: HashChain, token_ids: Sequence[int], retention: Retention) -> Pin | None:
        """Pin what the cache has of `token_ids`; None if it has nothing, or if there is no room for it."""
        self.expire()
        prefix = self._kv.match(chain, token_ids, 0)
        if not prefix.num_tokens or not self._can_open(prefix):
            return None
        digests = chain.digests[: prefix.num_tokens // self._kv.hash_block_size]
        until_s = self._clock() + retention.seconds
        known = self._pins.get(digests[-1])
        if known is not None:
            if (retention.is_firm, retention.priority) >= known.worth[:2]:
                known.retention = retention
            known.until_s = max(known.until_s, until_s)
            self._next_end_s = min(self._next_end_s, until_s)
            return known
        if not self._make_room(prefix, (retention.is_firm, retention.priority, until_s)):
            return None
        table = self._kv.open(prefix)
        blocks = frozenset(block for group in table.groups for block in group) - {NULL_BLOCK}
        pin = Pin(digests[-1], table, blocks, prefix.num_tokens, retention, until_s)
        for digest in digests[:-1]:
            shorter = self._pins.get(digest)
            if shorter is not None and not shorter.retention.is_firm and shorter.worth <= pin.worth:
                self.drop(digest)  # the longer one replaces it
        self._pins[pin.digest] = pin
        self.num_blocks = len(self._held())
        self._next_end_s = min(self._next_end_s, until_s)
        return pin

    def _can_open(self, prefix: SharedPrefix) -> bool:
        """Return True if there are blocks for what is outside the pool, besides those of what is in it."""
        kv, end = self._kv, prefix.num_tokens
        groups = zip(kv.groups, prefix.blocks, strict=True)
        live = {block for group, blocks in groups for block in blocks[group.first_needed(end) :]}
        num_unused = sum(kv.pool.ref_count(block) == 0 for block in live - {NULL_BLOCK})
        return num_unused + len(prefix.outside) <= kv.pool.num_free

    def check(self, num_tokens: int) -> None:
        """Raise RequestError if a firm pin of so many tokens is beyond the budget."""
        firm: set[int] = set()
        for pin in self._pins.values():
            if pin.retention.is_firm:
                firm |= pin.blocks
        needed, most = self._kv.peak_blocks(num_tokens, num_tokens), self.most_blocks
        if len(firm) + needed > most:
            raise RequestError(
                f"Pinning {num_tokens} tokens needs {needed} blocks of KV cache; pins may hold {most} "
                f"(prefix_pin_share={self._share}), and {len(firm)} are pinned. Release a pin, shorten the "
                "prefix, or raise prefix_pin_share.",
                "prompt",
            )

    def seconds_left(self, pin: Pin) -> float:
        """Return after how long it goes if nobody uses it."""
        return max(0.0, pin.until_s - self._clock())

    def touch(self, digests: Sequence[bytes]) -> None:
        """Begin the time anew of pins that a request has used; `digests`: of what it found in the cache."""
        for digest in digests:
            if (pin := self._pins.get(digest)) is not None:
                pin.until_s = max(pin.until_s, self._clock() + pin.retention.seconds)

    def expire(self) -> None:
        """Let go of those whose time is over."""
        now = self._clock()
        if now < self._next_end_s:
            return
        for pin in [pin for pin in self._pins.values() if pin.until_s <= now]:
            self.drop(pin.digest)
        self._next_end_s = min((pin.until_s for pin in self._pins.values()), default=inf)

    def drop(self, digest: bytes) -> bool:
        """Let go of one; return False if there is none."""
        pin = self._pins.pop(digest, None)
        if pin is not None:
            self._kv.release(pin.table)
            self.num_blocks = len(self._held())
        return pin is not None

    def drop_least(self) -> bool:
        """Make room; return False if nothing is pinned."""
        least = min(self._pins.values(), key=lambda pin: pin.worth, default=None)
        return least is not None and self.drop(least.digest)

    def clear(self) -> None:
        """Let go of all."""
        for digest in list(self._pins):
            self.drop(digest)

    def _held(self) -> set[int]:
        return set().union(*(pin.blocks for pin in self._pins.values()))

    def _make_room(self, prefix: SharedPrefix, worth: tuple[bool, int, float]) -> bool:
        """Drop pins that are worth less until this beginning fits the budget; return whether it does."""
        wanted = {block for group in prefix.blocks for block in group} - {NULL_BLOCK}
        while len(self._held() | wanted) + len(prefix.outside) > self.most_blocks:
            least = min(self._pins.values(), key=lambda pin: pin.worth, default=None)
            if least is None or least.worth >= worth:
                return False
            self.drop(least.digest)
        return True
