"""gpt-oss: the harmony format, messages on channels: analysis, commentary (calls have a recipient), final.

`<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.f
<|constrain|>json<|message|>{…}<|call|>`. Source: OpenAI's description of the harmony response format.
"""

from octavo.frontend.parsers.scanner import Move, Parser, Sink, drop

_CHANNEL, _MESSAGE, _START = "<|channel|>", "<|message|>", "<|start|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", _START)
_RECIPIENT = "functions."


class HarmonyParser(Parser):
    """Reasoning, calls and text; a text without a channel is an answer."""

    shows_special_tokens = True

    @classmethod
    def reasoning_tags(cls) -> tuple[str, str]:
        """The channel of analysis; the model goes on with another message."""
        return f"{_CHANNEL}analysis{_MESSAGE}", _ENDS[0]

    @classmethod
    def answer_tags(cls) -> tuple[str, str]:
        """All up to the channel of the answer."""
        return "", f"{_CHANNEL}final{_MESSAGE}"

    def read(self) -> Move[None]:
        """The format."""
        marker = yield from self.copy_until(self.text, _CHANNEL, _START)
        while marker:
            header, marker = yield from self.take_until(_MESSAGE, *_ENDS)
            if marker == _MESSAGE:
                yield from self.copy_until(self._sink(header), *_ENDS)
                marker = yield from self.copy_until(drop, _CHANNEL, _START)

    def _sink(self, header: str) -> Sink:
        words = header.replace(_CHANNEL, " ").replace("<|constrain|>", " ").split()
        recipient = next((word[3:] for word in words if word.startswith("to=")), "")
        if recipient.startswith(_RECIPIENT) and recipient != _RECIPIENT:
            self.start_call(recipient.removeprefix(_RECIPIENT))
            return self.arguments
        return self.reasoning if "analysis" in words or recipient else self.text
