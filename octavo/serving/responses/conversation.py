"""`chat_request`: a request of /v1/responses as the chat request that means the same.

Called by the routes of `responses`. Tools that OpenAI runs itself are left out, files and sound are refused.
"""

from collections.abc import Iterable, Sequence
from typing import Any
from uuid import uuid4

import msgspec

from octavo.base.errors import RequestError, wrong
from octavo.serving.foreign_fields import note_once
from octavo.serving.openai import protocol
from octavo.serving.responses.protocol import CreateResponse, Item, TextFormat

_TEXT_PARTS = ("input_text", "output_text", "text", "refusal")
_LOGPROBS = "message.output_text.logprobs"
_REFUSED = {
    "conversation": "go on from an answer with previous_response_id",
    "prompt": "there are no stored prompts: send instructions and input",
    "enable_response_messages": "raw messages are not told: ask for tokens by return_token_ids",
}
_ROLES = ("user", "assistant", "system", "developer")


def input_items(body: CreateResponse) -> list[Item]:
    """The request's own items, each with an id."""
    if isinstance(body.input, str):
        items = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": body.input}]}]
    else:
        items = [item if "type" in item else {"type": "message", **item} for item in body.input]
    return [item if item.get("id") else {**item, "id": f"msg_{uuid4().hex}"} for item in items]


def chat_request(body: CreateResponse, items: Sequence[Item]) -> protocol.ChatRequest:
    """Not checked yet for what the engine can do. Raises RequestError, which names the field.

    items: the whole conversation
    """
    _refuse(body)
    given = {name: getattr(body, name) for name in protocol.SamplingFields.__struct_fields__}
    if body.text is not None and body.text.format is not None:
        given["response_format"] = _response_format(body.text.format)
    if body.truncation == "auto":
        given["truncate_prompt_tokens"] = -1
    return protocol.ChatRequest(
        **given,
        messages=_messages(body.instructions, items),
        tools=_tools(body.tools or []) or None,
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=body.reasoning.effort if body.reasoning is not None else None,
        max_tokens=body.max_output_tokens,
        logprobs=_tells_logprobs(body),
        top_logprobs=body.top_logprobs,
        chat_template_kwargs=body.chat_template_kwargs,
    )


def _refuse(body: CreateResponse) -> None:
    for name, instead in _REFUSED.items():
        if getattr(body, name):
            raise wrong(name, f"is not supported: {instead}")
    for name in ("n", "best_of"):
        if getattr(body, name) not in (None, 1):
            raise RequestError(f"A response is one answer: {name} must be 1.", name)
    if body.top_logprobs is not None and not _tells_logprobs(body):
        raise RequestError(f'top_logprobs needs include: ["{_LOGPROBS}"].', "top_logprobs")


def _tells_logprobs(body: CreateResponse) -> bool:
    return _LOGPROBS in (body.include or ())


def _messages(instructions: str | None, items: Iterable[Item]) -> list[dict[str, Any]]:
    """Items as turns: calls join the turn of the assistant before them, system texts the one at the start."""
    turns: list[dict[str, Any]] = []
    if instructions:
        turns.append({"role": "system", "content": instructions})
    for item in items:
        match item.get("type"):
            case "message":
                _add_message(turns, item)
            case "function_call":
                _add_call(turns, item)
            case "function_call_output":
                output = _text(item, "output")
                turns.append({"role": "tool", "tool_call_id": _string(item, "call_id"), "content": output})
            case "reasoning":
                pass  # templates leave the thoughts of earlier turns out
            case kind:
                raise RequestError(
                    f"An item of type {str(kind)[:40]!r} is not supported: message, function_call, "
                    "function_call_output and reasoning are known.",
                    "input",
                )
    return turns


def _add_message(turns: list[dict[str, Any]], item: Item) -> None:
    role = item.get("role")
    if role not in _ROLES:
        raise RequestError(f"A message's role must be one of {', '.join(_ROLES)}, got {role!r:.40}.", "input")
    if any(_is_image(part) for part in item.get("content") or ()):
        turns.append({"role": role, "content": [_part_or_image(part) for part in item["content"]]})
        return
    content = _text(item, "content")
    if role in ("system", "developer"):
        role = "system"
        if len(turns) == 1 and turns[0]["role"] == "system":
            turns[0]["content"] += "\n\n" + content
            return
    turns.append({"role": role, "content": content})


def _add_call(turns: list[dict[str, Any]], item: Item) -> None:
    if not turns or turns[-1]["role"] != "assistant":
        turns.append({"role": "assistant", "content": ""})
    function = {"name": _string(item, "name"), "arguments": _string(item, "arguments")}
    call = {"id": _string(item, "call_id"), "type": "function", "function": function}
    turns[-1].setdefault("tool_calls", []).append(call)


def _text(item: Item, name: str) -> str:
    content = item.get(name)
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"A {item['type']}'s {name} must be a string or a list of parts.", "input")
    return "".join(map(_part, content))


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "input_image"


def _part_or_image(part: Any) -> dict[str, Any]:
    """An image as it is, to be read with the conversation; anything else as a part of text."""
    if not _is_image(part):
        return {"type": "text", "text": _part(part)}
    if not isinstance(part.get("image_url"), str):
        raise RequestError("An input_image needs image_url as a string: no file_id is read.", "input")
    return dict(part)


def _part(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in _TEXT_PARTS:
        raise RequestError(
            f"A content part of type {str(kind)[:40]!r} is not supported: text and images are.", "input"
        )
    return _string(part, "refusal" if kind == "refusal" else "text")


def _string(item: Item, name: str) -> str:
    if not isinstance(value := item.get(name), str):
        raise RequestError(f"A {item['type']} needs {name} as a string.", "input")
    return value


def _tools(tools: Iterable[dict[str, Any]]) -> list[protocol.Tool]:
    """The functions. Tools that OpenAI's servers run are left out: some programs always send them."""
    for kind in sorted({str(tool.get("type"))[:40] for tool in tools} - {"function"}):
        note_once("tools", kind, "is not there: octavo runs no tools. The model is not told of it.")
    return [_tool(tool) for tool in tools if tool.get("type") == "function"]


def _tool(tool: dict[str, Any]) -> protocol.Tool:
    try:
        return protocol.Tool(msgspec.convert(tool, protocol.Function))
    except msgspec.ValidationError as error:
        raise RequestError(f"tools: {error}.", "tools") from None


def _choice(choice: Any) -> Any:
    match choice:
        case None | "none" | "auto" | "required":
            return choice
        case {"type": "function", "name": str(name)}:
            return protocol.NamedTool(protocol.NamedFunction(name))
    raise RequestError(
        'tool_choice must be none, auto, required or {"type": "function", "name": …}.', "tool_choice"
    )


def _response_format(form: TextFormat) -> dict[str, Any]:
    if form.type != "json_schema":
        return {"type": form.type}
    described = {"name": form.name, "schema": form.schema, "strict": form.strict}
    return {"type": "json_schema", "json_schema": described}
