"""`BlockTable`: the blocks of one request; `SharedPrefix`: what it may begin with. Both are the manager's."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from octavo.messages.step import Place


class Outside(NamedTuple):
    """A content that a table needs as block number `column` of a group, and that is not in the pool."""

    group: int
    column: int
    place: Place


class SharedPrefix(NamedTuple):
    """A beginning that is in the cache, found by content or in a sibling's table; nothing is held yet."""

    num_tokens: int
    blocks: list[list[int]]
    """[group]: the first blocks of a table; null where the window has passed, and for what is `outside`."""
    epoch: int
    num_queried: int = 0
    """Tokens that were looked up in the prefix map."""
    outside: Sequence[Outside] = ()


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of one request, by group: as many as cover its tokens, null where the window has passed."""

    groups: list[list[int]]
    first_live: list[int]
    num_committed: int
    """Digests of the request whose blocks were offered to the prefix map, if it wants them."""
    epoch: int
    capacity: int = 0
    """Positions that every group's blocks cover."""
    num_forked: int = 0
    forked: dict[int, int] = field(default_factory=dict)
    """By group: a block with a copy of the state behind `num_forked` tokens, for those that fork there."""
