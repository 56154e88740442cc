"""`EncoderBudget`: which media one step encodes, and where chunks of prompts have to end for their sake.

Used by `StepPlan`. An item is encoded in the step whose chunk has its first token. The budget spreads the
encoder's work over steps, so that those who watch their tokens wait no longer than for a step of prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.messages.media import MediaItem


@dataclass(slots=True)
class EncoderBudget:
    """Counts placeholder tokens of items, each key once."""

    num_left: int
    """Of the budget; the first item of a step may exceed it."""
    keys: set[bytes] = field(default_factory=set)

    def cut(self, media: Sequence[MediaItem], start: int, end: int, longest: int) -> int:
        """Return where a chunk from `start` to `end` has to end, and count the items in it; `start`: nowhere.

        An item whose tokens see each other is computed whole: the chunk grows up to `longest`, or ends
        before it.
        """
        for item in media:
            if item.end <= start:
                continue
            if item.start >= end:
                break
            if item.sees_itself and item.end > end:
                if item.end > longest:
                    return max(item.start, start)
                end = item.end
            if not self.take(item.key, item.length):
                return max(item.start, start)
        return end

    def take(self, key: bytes, length: int) -> bool:
        """Count an item of so many tokens; return False, and do not, if there is no room for it."""
        if key not in self.keys:
            if self.keys and length > self.num_left:
                return False
            self.num_left -= length
            self.keys.add(key)
        return True
