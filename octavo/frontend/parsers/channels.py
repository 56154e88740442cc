"""Messages on channels: gpt-oss, Inkling and Muse. Each message says in its head what it is.

gpt-oss, the harmony format: analysis, commentary (calls have a recipient), final.
`<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.f
<|constrain|>json<|message|>{…}<|call|>`. Source: OpenAI's description of the harmony response format.
"""

from octavo.frontend.parsers.call_object import call, call_object
from octavo.frontend.parsers.scanner import Move, Parser, drop
from octavo.frontend.parsers.tagged import TaggedParser

_CHANNEL, _MESSAGE, _START = "<|channel|>", "<|message|>", "<|start|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", _START)
_RECIPIENT = "functions."


class HarmonyParser(Parser):
    """Reasoning, calls and text; a text without a channel is an answer."""

    shows_special_tokens = True
    marks = _ENDS

    @classmethod
    def reasoning_tags(cls) -> tuple[str, str]:
        """The channel of analysis; the model goes on with another message."""
        return f"{_CHANNEL}analysis{_MESSAGE}", _ENDS[0]

    @classmethod
    def answer_tags(cls) -> tuple[str, str]:
        """All up to the channel of the answer."""
        return "", f"{_CHANNEL}final{_MESSAGE}"

    def read(self) -> Move[None]:
        marker = yield from self.copy_until(self.text, _CHANNEL, _START)
        while marker:
            header, marker = yield from self.take_until(_MESSAGE, *_ENDS)
            if marker == _MESSAGE:
                yield from self._body(header)
                marker = yield from self.copy_until(drop, _CHANNEL, _START)

    def _body(self, header: str) -> Move[None]:
        words = header.replace(_CHANNEL, " ").replace("<|constrain|>", " ").split()
        recipient = next((word[3:] for word in words if word.startswith("to=")), "")
        sink = self.reasoning if "analysis" in words or recipient else self.text
        if recipient.startswith(_RECIPIENT) and recipient != _RECIPIENT:
            num_calls = self.num_calls
            yield from self.attempt(call(self, recipient.removeprefix(_RECIPIENT)))
            sink = drop if self.num_calls > num_calls else self.text
        yield from self.copy_until(sink, *_ENDS)


class InklingParser(Parser):
    """Inkling: messages whose first token says whether they are thoughts, text or a call."""

    shows_special_tokens = True
    marks = ("<|end_message|>", "<|content_model_end_sampling|>")

    @classmethod
    def reasoning_tags(cls) -> tuple[str, str]:
        return "<|content_thinking|>", "<|end_message|>"

    def read(self) -> Move[None]:
        thoughts, call_mark = "<|content_thinking|>", "<|content_invoke_tool_json|>"
        others = ("<|message_model|>", "<|content_text|>", *self.marks)
        while marker := (yield from self.copy_until(self.text, thoughts, call_mark, *others)):
            if marker == thoughts:
                yield from self.copy_until(self.reasoning, *self.marks)
            elif marker == call_mark:
                num_calls = self.num_calls
                yield from self.attempt(call_object(self))
                yield from self.copy_until(drop if self.num_calls > num_calls else self.text, *self.marks)


class MuseParser(TaggedParser):
    """Muse Glimmer: messages to oneself, to the user or to a tool; the last hold calls in tags."""

    opening, closing = "<atem:function_calls>", "</atem:function_calls>"
    call, name_end, call_end = '<atem:invoke name="', '">', "</atem:invoke>"
    parameter, key_end, parameter_end = '<atem:parameter name="', '">', "</atem:parameter>"
    padding = ""
    for_users: tuple[str, ...] = ("user",)
    for_nobody: tuple[str, ...] = ()
    unnamed = "user"
    """Recipient of a message whose head names none."""

    @classmethod
    def reasoning_tags(cls) -> tuple[str, str]:
        return " to=self<|message|>", "<|eom|>"

    def read(self) -> Move[None]:
        """The format; the prompt may have begun the first head, and a text without one is an answer."""
        space = yield from self.take_space()
        if (yield from self.next_is("to=")) or (yield from self.next_is("<|message|>")):
            yield from self._message()
        else:
            self.text(space)
        while marker := (yield from self.copy_until(self.text, "<|start|>", "<|eom|>", "<|eot|>")):
            if marker == "<|start|>":
                yield from self._message()

    def _message(self) -> Move[None]:
        head, _ = yield from self.take_until("<|message|>")
        recipient = head.partition("to=")[2].split(maxsplit=1)[0] if "to=" in head else self.unnamed
        if recipient in ("self", *self.for_users, *self.for_nobody):
            sink = self.text if recipient in self.for_users else drop
            sink = self.reasoning if recipient == "self" else sink
            yield from self.copy_until(sink, "<|eom|>", "<|eot|>")
            return
        ends = ("<|eom|>", "<|eot|>")
        while (marker := (yield from self.copy_until(drop, self.call, *ends))) == self.call:
            yield from self.attempt(self._call(), marker)


class MuseSparkParser(MuseParser):
    """Muse Spark: thoughts may lack a recipient; users see commentary, nobody sees notes to developers."""

    for_users = ("user", "commentary")
    for_nobody = ("developer",)
    unnamed = "self"
