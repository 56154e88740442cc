"""Calls as bare JSON, `{"name": …, "parameters": {…}}`, alone or among text: Llama 3 and xLAM."""

from typing import ClassVar

from octavo.frontend.parsers.call_object import call_list, call_object
from octavo.frontend.parsers.scanner import Move, Parser


class Llama3JsonParser(Parser):
    """Text and calls in turn; several calls may have `;` between them."""

    shows_special_tokens = True
    wraps: ClassVar[dict[str, str]] = {"<|python_tag|>": ""}
    """What may stand before a call, and after it."""
    brackets = "{"
    ends: ClassVar[tuple[str, ...]] = ("<|eom_id|>", "<|eot_id|>")

    def read(self) -> Move[None]:
        while marker := (yield from self.copy_until(self.text, *self.brackets, *self.wraps, *self.ends)):
            if marker in self.ends:
                return
            space = ""
            if marker in self.wraps:
                space = yield from self.take_space()
                if (yield from self.peek()) not in tuple(self.brackets):
                    self.text(marker + space)
                    continue
                yield from self._calls(marker, marker + space)
            else:
                self.untake(marker)
                yield from self._calls("", "")

    def _calls(self, wrap: str, opening: str) -> Move[None]:
        read = call_list if (yield from self.peek()) == "[" else call_object
        if not (yield from self.attempt(read(self, needs_arguments=True), opening)):
            return
        space = yield from self.take_space()
        if (ending := self.wraps.get(wrap)) and (yield from self.take_if(ending)):
            return
        if (yield from self.peek()) in (";", ","):
            yield from self.take()
        else:
            self.text(space)


class XlamParser(Llama3JsonParser):
    """xLAM: a list of calls, perhaps in a fence or tags."""

    wraps: ClassVar[dict[str, str]] = {"```json": "```", "<tool_call>": "</tool_call>"}
    brackets = "{["
    ends = ()
