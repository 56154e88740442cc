"""`SectionParser`: formats that put their calls, each between marks of its own, into one marked section.

The base of deepseek, kimi and plamo, which differ in the marks and in how a call begins.
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

    def __init_subclass__(cls) -> None:
        cls.begins, cls.marks = (cls.BEGIN,), (cls.END, cls.CALL, cls.CALL_END)

    def read(self) -> Move[None]:
        """The format; a call that is none becomes text, with the marks before it."""
        while (yield from self.copy_until(self.text, self.BEGIN)):
            opening = self.BEGIN
            while (yield from self.take_until(self.CALL, self.END))[1] == self.CALL:
                yield from self.attempt(self.call(), opening + self.CALL)
                opening = ""

    @abstractmethod
    def call(self) -> Move[None]:
        """One call, behind its mark. Raises Malformed."""
