"""`MarkedParser`: the base of formats that put calls between two marks, anywhere in the text."""

from abc import abstractmethod
from typing import ClassVar

from octavo.frontend.parsers.scanner import Move, Parser


class MarkedParser(Parser):
    """Text and blocks of calls in turn."""

    shows_special_tokens = True
    openings: ClassVar[tuple[str, ...]]
    closing: ClassVar[str]
    """"": there is none."""

    def __init_subclass__(cls) -> None:
        if "openings" in vars(cls) and "begins" not in vars(cls):
            cls.begins = cls.openings

    def read(self) -> Move[None]:
        """The format; a block that is malformed becomes text, one that holds nothing vanishes."""
        opening = yield from self.copy_until(self.text, *self.openings)
        while opening:
            next_one = yield from self.block(opening)
            opening = next_one or (yield from self.copy_until(self.text, *self.openings))

    def block(self, opening: str) -> Move[str]:
        """Read one block; the next opening, if that is read too."""
        num_calls = self.num_calls
        is_whole = yield from self.attempt(self._inside(), opening)
        if not self.closing or not (is_whole or self.num_calls > num_calls):
            return ""
        _, marker = yield from self.take_until(self.closing, *self.openings)
        return "" if marker == self.closing else marker

    def _inside(self) -> Move[None]:
        yield from self.skip_space()
        if not self.closing or not (yield from self.next_is(self.closing)):
            yield from self.calls()

    @abstractmethod
    def calls(self) -> Move[None]:
        """What stands between the marks. Raises Malformed."""
