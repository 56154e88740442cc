"""`WrittenAnswer`: a turn as Ollama tells it, line by line or whole. Used by `writing`, one per request."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import UNSET

from octavo.frontend.parsers.events import CallArguments, CallStart, Reasoning, Text
from octavo.serving.ollama.protocol import Call, CallItem, TurnMessage, Written
from octavo.serving.openai.answers import TokenLogprob
from octavo.serving.openai.turn import TextLogprobs, TurnEnd, TurnEvent, TurnStart

_NS = 1_000_000_000


class WrittenAnswer:
    """Fed with all events of a turn, in order."""

    def __init__(self, model: str, began_s: float, *, is_chat: bool) -> None:
        """began_s: of time.monotonic, when the request came; until now its model was brought."""
        self._model, self._is_chat = model, is_chat
        self._began_s, self._loaded_s = began_s, time.monotonic()
        self._first_s = self._loaded_s
        self._text, self._thinking = "", ""
        self._logprobs: list[TokenLogprob] = []
        self._calls: list[tuple[str, list[str]]] = []
        self._whole: list[TokenLogprob] = []
        self._end: Written | None = None

    def lines(self, event: TurnEvent) -> Iterator[Written]:
        """What a stream tells of an event. To be exhausted."""
        match event:
            case TurnStart():
                self._first_s = time.monotonic()
            case TextLogprobs(entries):
                self._logprobs = entries
                self._whole += entries
            case Text(text):
                self._text += text
                yield self._line(text=text, logprobs=self._logprobs)
                self._logprobs = []
            case Reasoning(text):
                self._thinking += text
                yield self._line(thinking=text)
            case CallStart(_, name):
                self._calls.append((name, []))
            case CallArguments(index, text):
                self._calls[index][1].append(text)
            case TurnEnd():
                if self._calls:
                    yield self._line(calls=self._read_calls())
                self._end = self._last(event)
                yield self._end

    def whole(self) -> Written:
        """The answer in one piece, when the turn has ended."""
        assert self._end is not None
        calls = self._read_calls() if self._calls else None
        line = self._line(self._text, self._thinking, calls, self._whole)
        changes = {"message": line.message, "response": line.response, "thinking": line.thinking}
        return msgspec.structs.replace(self._end, logprobs=line.logprobs, **changes)

    def nothing(self, reason: str) -> Written:
        """The answer to a request without a prompt: the model has been loaded, or unloaded."""
        return msgspec.structs.replace(self._line(), done=True, done_reason=reason)

    def _line(
        self,
        text: str = "",
        thinking: str = "",
        calls: list[CallItem] | None = None,
        logprobs: list[TokenLogprob] | None = None,
    ) -> Written:
        told: dict[str, Any] = {"model": self._model, "created_at": now()}
        if logprobs:
            told["logprobs"] = logprobs
        thought: Any = thinking or UNSET
        if not self._is_chat:
            return Written(response=text, thinking=thought, **told)
        return Written(message=TurnMessage(content=text, thinking=thought, tool_calls=calls or UNSET), **told)

    def _last(self, end: TurnEnd) -> Written:
        ended_s = time.monotonic()
        return msgspec.structs.replace(
            self._line(),
            done=True,
            done_reason="length" if end.finish_reason == "length" else "stop",
            total_duration=int((ended_s - self._began_s) * _NS),
            load_duration=int((self._loaded_s - self._began_s) * _NS),
            prompt_eval_count=end.usage.prompt_tokens,
            prompt_eval_duration=int((self._first_s - self._loaded_s) * _NS),
            eval_count=end.usage.completion_tokens,
            eval_duration=int((ended_s - self._first_s) * _NS),
        )

    def _read_calls(self) -> list[CallItem]:
        return [CallItem(Call(name, _arguments("".join(pieces)))) for name, pieces in self._calls]


def now() -> str:
    """The time as Ollama writes it."""
    return moment(time.time())


def moment(seconds: float) -> str:
    """A time since the epoch as Ollama writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _arguments(text: str) -> dict[str, Any]:
    """A call that was cut off has none."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError:
        return {}
