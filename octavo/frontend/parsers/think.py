"""Reasoning in tags: `<think>…</think>`, then the answer. Families differ in the tags and who writes them."""

import re
from typing import ClassVar

from octavo.frontend.parsers.scanner import Move, Parser


class ThinkParser(Parser):
    """Reasoning if the text begins with the tag, or the prompt ended with it; then the answer."""

    shows_special_tokens = True
    opening, closing = "<think>", "</think>"
    is_always_open = False
    answer_marks: ClassVar[tuple[str, ...]] = ()
    """Tags that may stand around the answer, and are no part of it."""

    def __init__(self, prompt: str = "") -> None:
        """prompt: what the text answers; its last word may be a tag."""
        super().__init__()
        prompt = prompt.rstrip()
        self._is_open = prompt.endswith(self.opening) or (
            self.is_always_open and not prompt.endswith(self.closing)
        )
        self.interruptions: tuple[str, ...] = ()
        """What ends the reasoning beside its tag, and is not read here: calls begin so."""

    @classmethod
    def reasoning_tags(cls) -> tuple[str, str]:
        return "" if cls.is_always_open else cls.opening, cls.closing

    def read(self) -> Move[None]:
        space = yield from self.take_space()
        is_tagged = yield from self.take_if(self.opening)
        if is_tagged or self._is_open:
            if not is_tagged:
                self.reasoning(space)
            marker = yield from self.copy_until(self.reasoning, self.closing, *self.interruptions)
            if marker in self.interruptions:  # and its tag may still come
                self.text(marker)
                yield from self.copy_until(self.text, self.closing)
        elif not (yield from self.take_if(self.closing)):  # so some say that they do not think
            self.text(space)
        if self.answer_marks:
            while (yield from self.copy_until(self.text, *self.answer_marks)):
                pass
        yield from self.copy_rest(self.text)


class DeepSeekR1Parser(ThinkParser):
    """DeepSeek R1: its answers begin inside the reasoning, whether or not the tag is there."""

    is_always_open = True


class AppendThinkParser(ThinkParser):
    """MiniMax M2 where thoughts are to stay in the text, with their tags."""

    def read(self) -> Move[None]:
        """The text as it is, with the tag that the template wrote."""
        if not (yield from self.next_is(self.opening)):
            self.text(self.opening)
        yield from self.copy_rest(self.text)


def _tagged(opening: str, closing: str, *answer_marks: str) -> type[ThinkParser]:
    tags = {"opening": opening, "closing": closing, "answer_marks": answer_marks}
    return type("ThinkParser", (ThinkParser,), tags | {"__doc__": f"Reasoning in {opening} and {closing}."})


ApertusThinkParser = _tagged("<|inner_prefix|>", "<|inner_suffix|>")
CohereThinkParser = _tagged(
    *("<|START_THINKING|>", "<|END_THINKING|>"),
    *("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
)
ErnieThinkParser = _tagged("<think>", "</think>", "<response>", "</response>")
GraniteThinkParser = _tagged("Here is my thought process:", "Here is my response:")
HunyuanThinkParser = _tagged("<think>", "</think>", "<answer>", "</answer>")
KimiK3ThinkParser = _tagged(
    *("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    *("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
)
MagistralParser = _tagged("[THINK]", "[/THINK]")
MiniMaxM3ThinkParser = _tagged("<mm:think>", "</mm:think>")
PlamoThinkParser = _tagged("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>")
SeedParser = _tagged("<seed:think>", "</seed:think>")
SolarThinkParser = _tagged("<|think:start|>", "<|think:end|>")


class HorizonThinkParser(ThinkParser):
    """K2 Horizon: the prompt's tag says how long to think."""

    opening, closing = "<ifm|think>", "</ifm|think>"

    def __init__(self, prompt: str = "") -> None:
        """prompt: it ends with the tag."""
        if tag := re.search(r"<(ifm\|think_fast(?:er)?)>\s*$", prompt):
            self.opening, self.closing = f"<{tag[1]}>", f"</{tag[1]}>"
        super().__init__(prompt)


class HyThinkParser(ThinkParser):
    """Hunyuan 3 and 4: the tags of a checkpoint may have a suffix, `<think:6124c78e>`."""

    def __init__(self, prompt: str = "") -> None:
        """prompt: what the text answers; its last word may be a tag."""
        if tag := re.search(r"<(think:[^\s<>]+)>\s*$", prompt):
            self.opening, self.closing = f"<{tag[1]}>", f"</{tag[1]}>"
        super().__init__(prompt)

    def read(self) -> Move[None]:
        space = yield from self.take_space()
        if (yield from self.next_is("<think:")) and not self._is_open:
            tag, _ = yield from self.take_until(">")
            self.closing, self._is_open = f"</{tag[1:]}>", True
        else:
            self.text(space)
        yield from super().read()
