"""`State`: where outputs of a grammar stand, and what the library said of the tokens that may come there.

Used by `guidance`.
"""

from collections.abc import Sequence
from typing import Any

from octavo.engine.structured.shortlist import Shortlist

_ANY_TOKEN = range(1 << 31)


class State:
    """A place of outputs and, if that is known, what decides how they go on: these share its answer.

    Others have a state of their own, which goes with them.
    """

    __slots__ = ("after", "answer", "place", "residue", "shortlist", "spelt")

    def __init__(self, place: int, shortlist: Shortlist | None, residue: Any) -> None:
        self.residue = residue
        """None if it is not known."""
        self.after: dict[int, State] = {}
        """By what a token is spelt like that may come and leaves the counts as they are."""
        self.move(place, shortlist)

    def move(self, place: int, shortlist: Shortlist | None) -> None:
        """Go to another place."""
        self.place, self.shortlist = place, shortlist
        self.spelt: Sequence[int] = _ANY_TOKEN if shortlist is None else shortlist.spelt
        self.answer: bytes | None = None
        """What the library says of the tokens of the list."""
