"""Gemma's function calling: `call:name{key:value}` between special tokens, strings between others.

FunctionGemma: `<start_function_call>call:f{city:<escape>Paris<escape>}<end_function_call>`.
Gemma 4: `<|tool_call>call:f{city:<|"|>Paris<|"|>}<tool_call|>`, and its reasoning in `<|channel>thought`.
"""

import json

from octavo.frontend.parsers.scanner import Malformed, Move, Parser

_VALUE_END = ",]}"
_DEEPEST = 32


class FunctionGemmaParser(Parser):
    """Text and calls in turn."""

    shows_special_tokens = True
    opening, closing, quote = "<start_function_call>", "<end_function_call>", "<escape>"
    thought, thought_end = "", ""

    @classmethod
    def reasoning_tags(cls) -> tuple[str, str]:
        """The tokens of Gemma 4."""
        return cls.thought, cls.thought_end

    def read(self) -> Move[None]:
        """The format."""
        markers = [self.opening, *([self.thought] if self.thought else [])]
        while marker := (yield from self.copy_until(self.text, *markers)):
            if marker == self.thought:
                yield from self.skip_space()
                yield from self.copy_until(self.reasoning, self.thought_end)
            elif (yield from self.attempt(self._call(), self.opening)):
                yield from self.take_until(self.closing)

    def _call(self) -> Move[None]:
        yield from self.skip_space()
        yield from self.expect("call:")
        name, brace = yield from self.take_until("{")
        if not brace:
            raise Malformed
        self.start_call(name.strip())
        yield from self._object(1)

    def _object(self, depth: int) -> Move[None]:
        """The rest of an object whose brace is read, as JSON."""
        if depth > _DEEPEST:
            raise Malformed
        self.arguments("{")
        is_first = True
        while (char := (yield from self.skip_space())) != "}":
            if not char:
                raise Malformed
            key = yield from self._key()
            self.arguments(f"{'' if is_first else ', '}{json.dumps(key, ensure_ascii=False)}: ")
            yield from self._value(depth)
            is_first = False
            if (yield from self.skip_space()) == ",":
                yield from self.take()
        yield from self.take()
        self.arguments("}")

    def _key(self) -> Move[str]:
        if (yield from self.peek(len(self.quote))) == self.quote:
            yield from self.take(len(self.quote))
            key, _ = yield from self.take_until(self.quote)
            yield from self.take_until(":")
        else:
            key, _ = yield from self.take_until(":")
        return key.strip()

    def _value(self, depth: int) -> Move[None]:
        char = yield from self.skip_space()
        if (yield from self.peek(len(self.quote))) == self.quote:
            yield from self.take(len(self.quote))
            value, _ = yield from self.take_until(self.quote)
            self.arguments(json.dumps(value, ensure_ascii=False))
        elif char == "{":
            yield from self.take()
            yield from self._object(depth + 1)
        elif char == "[":
            yield from self.take()
            yield from self._list(depth + 1)
        else:
            self.arguments(_scalar((yield from self._bare())))

    def _list(self, depth: int) -> Move[None]:
        if depth > _DEEPEST:
            raise Malformed
        self.arguments("[")
        is_first = True
        while (char := (yield from self.skip_space())) != "]":
            if not char:
                raise Malformed
            if not is_first:
                self.arguments(", ")
            yield from self._value(depth)
            is_first = False
            if (yield from self.skip_space()) == ",":
                yield from self.take()
        yield from self.take()
        self.arguments("]")

    def _bare(self) -> Move[str]:
        """A number or word without quotes."""
        parts: list[str] = []
        while (char := (yield from self.peek())) not in _VALUE_END:
            parts.append((yield from self.take()))
        if not char:
            raise Malformed
        return "".join(parts).strip()


class Gemma4Parser(FunctionGemmaParser):
    """The same with Gemma 4's tokens, and its reasoning."""

    opening, closing, quote = "<|tool_call>", "<tool_call|>", '<|"|>'
    thought, thought_end = "<|channel>thought", "<channel|>"


def _scalar(word: str) -> str:
    """A JSON scalar as it is; any other word as a string."""
    try:
        value = json.loads(word)
    except (ValueError, RecursionError):
        return json.dumps(word, ensure_ascii=False)
    return word if isinstance(value, bool | int | float | None) else json.dumps(word, ensure_ascii=False)
