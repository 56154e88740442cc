"""Reasoning in tags: `<think>…</think>`, then the answer. Families differ by who writes the first tag."""

from octavo.frontend.parsers.scanner import Move, Parser


class ThinkParser(Parser):
    """Reasoning if the text begins with the tag, or the prompt ended with it; then the answer."""

    shows_special_tokens = True
    opening, closing = "<think>", "</think>"
    is_always_open = False

    def __init__(self, prompt: str = "") -> None:
        """prompt: what the text answers; its last word may be a tag."""
        super().__init__()
        prompt = prompt.rstrip()
        self._is_open = prompt.endswith(self.opening) or (
            self.is_always_open and not prompt.endswith(self.closing)
        )

    @classmethod
    def reasoning_tags(cls) -> tuple[str, str]:
        """The tags."""
        return "" if cls.is_always_open else cls.opening, cls.closing

    def read(self) -> Move[None]:
        """The format."""
        space = yield from self.take_space()
        is_tagged = (yield from self.peek(len(self.opening))) == self.opening
        if is_tagged:
            yield from self.take(len(self.opening))
        if is_tagged or self._is_open:
            yield from self.skip_space()
            yield from self.copy_until(self.reasoning, self.closing)
            yield from self.skip_space()
        else:
            self.text(space)
        yield from self.copy_rest(self.text)


class DeepSeekR1Parser(ThinkParser):
    """DeepSeek R1: its answers begin inside the reasoning, whether or not the tag is there."""

    is_always_open = True


class GraniteThinkParser(ThinkParser):
    """Granite 3.2: the tags are sentences."""

    opening, closing = "Here is my thought process:", "Here is my response:"


class SeedParser(ThinkParser):
    """Seed-OSS."""

    opening, closing = "<seed:think>", "</seed:think>"


class MagistralParser(ThinkParser):
    """Mistral's reasoning models."""

    opening, closing = "[THINK]", "[/THINK]"
