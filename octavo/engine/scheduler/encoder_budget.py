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
            if item.key not in self.keys:
                if self.keys and item.length > self.num_left:
                    return max(item.start, start)
                self.num_left -= item.length
                self.keys.add(item.key)
        return end
