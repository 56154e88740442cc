"""What a parser makes of a model's text."""

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Text:
    """Part of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Part of what the model thought before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The model calls a tool; its arguments follow."""

    index: int
    """Counts the calls of an answer."""
    name: str
    id: str = ""
    """By which the model knows it; "": any will do."""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """Part of a call's arguments, a JSON text."""

    index: int
    text: str


Event = Text | Reasoning | CallStart | CallArguments


def coalesced(events: Iterable[Event]) -> list[Event]:
    """The same with neighbours of one kind joined, and without empty ones."""
    joined: list[tuple[Event, list[str]]] = []
    for event in events:
        if isinstance(event, CallStart):
            joined.append((event, []))
        elif event.text:
            last = joined[-1][0] if joined else None
            is_same = type(last) is type(event) and getattr(last, "index", 0) == getattr(event, "index", 0)
            if is_same:
                joined[-1][1].append(event.text)
            else:
                joined.append((event, [event.text]))
    return [
        event if isinstance(event, CallStart) else replace(event, text="".join(parts))
        for event, parts in joined
    ]
