"""Parser events as OpenAI's messages, whole or in deltas. Used by `chat_answer`."""

from collections.abc import Iterable

from octavo.frontend.parsers.events import CallArguments, CallStart, Event, Reasoning, Text
from octavo.serving.openai.answers import ChatMessage, Delta, FunctionCall, ToolCall, ToolCallDelta
from octavo.serving.openai.tools import call_id


def message_of(turn: Delta, role: str, echoed: str) -> ChatMessage:
    """The whole turn, of which all is new; echoed: what its text begins with."""
    text, thought = echoed + (turn.content or ""), turn.reasoning or None
    calls = [ToolCall(call.id or call_id(), call.function) for call in turn.tool_calls or ()]
    return ChatMessage(
        role,
        text if text or not calls else None,
        tool_calls=calls,
        reasoning=thought,
        reasoning_content=thought,
    )


def delta_of(events: Iterable[Event]) -> Delta:
    """What is new of a turn; an empty text when there is nothing."""
    delta = Delta()
    for event in events:
        match event:
            case Text(text):
                delta.content = (delta.content or "") + text
            case Reasoning(text):
                delta.reasoning = delta.reasoning_content = (delta.reasoning or "") + text
            case CallStart(index, name, given):
                start = ToolCallDelta(index, FunctionCall(name), given or call_id(), "function")
                delta.tool_calls = [*(delta.tool_calls or []), start]
            case CallArguments(index, text):
                _add_arguments(delta, index, text)
    return delta if delta != Delta() else Delta(content="")


def _add_arguments(delta: Delta, index: int, text: str) -> None:
    """To the call's start, if it is in this delta, or as a piece of its own."""
    calls = delta.tool_calls = delta.tool_calls or []
    if not calls or calls[-1].index != index:
        calls.append(ToolCallDelta(index, FunctionCall()))
    calls[-1].function.arguments += text
