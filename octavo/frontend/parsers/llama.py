"""Llama 3: the answer is `{"name": …, "parameters": {…}}`, perhaps after <|python_tag|>, several with `;`."""

from octavo.frontend.parsers.call_object import call_object
from octavo.frontend.parsers.scanner import Move, Parser

_TAG = "<|python_tag|>"


class Llama3JsonParser(Parser):
    """Calls or text, as the first character says."""

    shows_special_tokens = True

    def read(self) -> Move[None]:
        """The format."""
        opening = ""
        if (yield from self.skip_space()) == "<" and (yield from self.peek(len(_TAG))) == _TAG:
            opening = yield from self.take(len(_TAG))
            yield from self.skip_space()
        while (yield from self.peek()) == "{" and (yield from self.attempt(call_object(self), opening)):
            opening = ""
            if (yield from self.skip_space()) in (";", ","):
                yield from self.take()
                yield from self.skip_space()
        yield from self.copy_until(self.text, "<|eom_id|>", "<|eot_id|>")
