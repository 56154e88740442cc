"""`StopFinder`: finds stop strings in a stream of text, across the borders of its pieces.

Called by the output processor, one per sequence that has stop strings. It holds back what may still become
the beginning of a stop string (the longest one less a character), so nothing of a stop string is ever shown.
Each character is searched a bounded number of times, whatever the length of the text.
"""

from typing import NamedTuple


class StopScan(NamedTuple):
    """What may be shown now, and the stop string that ended the text (None: it goes on)."""

    text: str
    stop: str | None


class StopFinder:
    """Feed it text; it gives text back, up to the first stop string (or to its end, with `include_stop`).

    … shown already | held back | new text
                └────── tail ───┘           a stop string ends in the new text, so it begins in tail or later
    """

    def __init__(self, stops: list[str], *, include_stop: bool = False) -> None:
        self._stops = stops
        self._include_stop = include_stop
        self._overlap = max(map(len, stops)) - 1
        self._tail = ""
        self._num_held = 0

    def feed(self, text: str, *, armed: bool = True) -> StopScan:
        """Add `text`; when not `armed`, no stop string may end in it. Feed nothing after a stop was found."""
        window = self._tail + text
        start = len(self._tail) - self._num_held
        hit = self._first(window, len(self._tail)) if armed else None
        if hit is not None:
            position, stop = hit
            self._num_held = 0
            return StopScan(window[start : position + len(stop) * self._include_stop], stop)
        self._tail = window[max(0, len(window) - self._overlap) :]
        self._num_held = 0 if self._include_stop else len(self._tail)
        return StopScan(window[start : len(window) - self._num_held], None)

    def finish(self) -> str:
        """What was held back, when the text ends for another reason."""
        held = self._tail[len(self._tail) - self._num_held :]
        self._num_held = 0
        return held

    def _first(self, window: str, old: int) -> tuple[int, str] | None:
        """Where the stop begins that is complete first after `old` characters; of several, the longest."""
        begins = [(window.find(stop, max(0, old - len(stop) + 1)), stop) for stop in self._stops]
        ends = [(begin + len(stop), begin, stop) for begin, stop in begins if begin >= 0]
        return min(ends)[1:] if ends else None
