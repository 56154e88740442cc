"""`SectionParser`: formats that put their calls, each between marks of its own, into one marked section.

The base of deepseek and kimi, which differ in the marks and in how a call begins.
"""

from abc import abstractmethod
from typing import ClassVar

from octavo.frontend.parsers.scanner import Move, Parser


class SectionParser(Parser):
    """Text, then a section of calls."""

    shows_special_tokens = True
    BEGIN: ClassVar[str]
    END: ClassVar[str]
    CALL: ClassVar[str]
    CALL_END: ClassVar[str]

    def read(self) -> Move[None]:
        """The format; a call that is none becomes text, with the marks before it."""
        while (yield from self.copy_until(self.text, self.BEGIN)):
            opening = self.BEGIN
            while (yield from self.take_until(self.CALL, self.END))[1] == self.CALL:
                if not (yield from self.attempt(self.call(), opening + self.CALL)):
                    break
                opening = ""
                yield from self.take_until(self.CALL_END)

    @abstractmethod
    def call(self) -> Move[None]:
        """One call, behind its mark. Raises Malformed."""
