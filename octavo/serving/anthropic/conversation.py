"""`chat_request`: a request in Anthropic's words as the chat request that means the same.

Called by the routes of `messages`. What only Anthropic's own models or machines can do is refused.
"""

import json
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import structs

from octavo.base.errors import RequestError
from octavo.serving.anthropic import protocol
from octavo.serving.openai.protocol import ChatRequest, Function, NamedFunction, NamedTool
from octavo.serving.openai.protocol import Tool as ChatTool
from octavo.serving.openai.turn import thinking_variables

_IGNORED_BLOCKS = ("thinking", "redacted_thinking")
"""Of earlier turns; templates leave such thoughts out."""
_REFUSED_BLOCKS = {
    "image": "images are in turns of the user",
    "document": "put the document's text into a block of type text",
    "search_result": "put the text into a block of type text",
    "container_upload": "there are no containers",
}
_TTLS_S = {"5m": 300.0, "1h": 3600.0}
_MOST_BREAKPOINTS = 4
_JSON_NAMES: dict[type, str] = {str: "string", dict: "object"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_request(body: protocol.CountTokensRequest) -> ChatRequest:
    """Not checked yet for what the engine can do. Raises RequestError, which names the field."""
    continues = body.messages[-1].role == "assistant"
    request = ChatRequest(
        messages=list(_messages(body)),
        model=body.model,
        tools=[_tool(tool) for tool in body.tools or []] or None,
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=not (body.tool_choice and body.tool_choice.disable_parallel_tool_use),
        include_reasoning=_shows_thinking(body),
        continue_final_message=continues,
        add_generation_prompt=not continues,
    )
    if body.thinking is not None:
        request.chat_template_kwargs = thinking_variables(is_on=body.thinking.type != "disabled")
    if (config := body.output_config) is not None:
        request.reasoning_effort = config.effort
        if config.format is not None:
            schema = {"name": "output", "schema": config.format.schema}
            request.response_format = {"type": "json_schema", "json_schema": schema}
    if isinstance(body, protocol.MessagesRequest):
        _set_sampling(request, body)
    request.retention_s = _retention_s(body)
    return request


def kept_messages(body: protocol.CountTokensRequest) -> list[dict[str, Any]] | None:
    """The conversation up to its last breakpoint; None if there is none, or one for the whole."""
    if body.cache_control is not None:
        return None
    for number, turn in reversed(list(enumerate(body.messages))):
        places = [i for i, block in enumerate(turn.content) if _is_breakpoint(block)]
        if places:
            last = structs.replace(turn, content=turn.content[: places[-1] + 1])
            return list(_messages(structs.replace(body, messages=[*body.messages[:number], last])))
    if any(map(_is_breakpoint, body.system or ())) or any(tool.cache_control for tool in body.tools or ()):
        # Templates ask for somebody who speaks.
        return list(_messages(structs.replace(body, messages=[protocol.Turn("user", "")])))
    return None


def _is_breakpoint(block: object) -> bool:
    return isinstance(block, dict) and bool(block.get("cache_control"))


def _retention_s(body: protocol.CountTokensRequest) -> float | None:
    contents = [body.system, *(message.content for message in body.messages)]
    blocks = [block for content in contents if isinstance(content, list) for block in content]
    given: list[object] = [block["cache_control"] for block in blocks if block.get("cache_control")]
    given += [entry.cache_control for entry in (body, *(body.tools or ())) if entry.cache_control]
    if len(given) > _MOST_BREAKPOINTS:
        raise _wrong(
            f"A maximum of {_MOST_BREAKPOINTS} blocks with cache_control may be provided. Found {len(given)}"
        )
    try:
        controls = [
            msgspec.convert(control, protocol.CacheControl, from_attributes=True) for control in given
        ]
    except msgspec.ValidationError as error:
        allowed = '{"type": "ephemeral"}, with a ttl of "5m" or "1h" if need be'
        raise _wrong(f"cache_control must be {allowed} ({error})") from None
    return max((_TTLS_S[control.ttl] for control in controls), default=None)


def _set_sampling(request: ChatRequest, body: protocol.MessagesRequest) -> None:
    for name in ("max_tokens", "temperature", "top_p", "top_k", "seed", "lora", "speculative"):
        setattr(request, name, getattr(body, name))
    request.stop = body.stop_sequences
    if body.thinking is not None:
        request.thinking_token_budget = body.thinking.budget_tokens


def _shows_thinking(body: protocol.CountTokensRequest) -> bool:
    """A client that did not ask for thoughts need not know what to do with them."""
    thinking = body.thinking
    return thinking is not None and thinking.type != "disabled" and thinking.display != "omitted"


def _messages(body: protocol.CountTokensRequest) -> Iterator[dict[str, Any]]:
    if body.system:
        yield {"role": "system", "content": _content(body.system, "system")}
    for message in body.messages:
        if message.role == "assistant":
            yield _assistant(message)
        else:
            yield from _asked(message)


def _assistant(message: protocol.Turn) -> dict[str, Any]:
    if isinstance(message.content, str):
        return {"role": "assistant", "content": message.content}
    calls, texts = [], []
    for block in message.content:
        if block.get("type") == "tool_use":
            name, value = _field(block, "name", str), _field(block, "input", dict)
            function = {"name": name, "arguments": json.dumps(value, ensure_ascii=False)}
            calls.append({"id": _field(block, "id", str), "type": "function", "function": function})
        elif block.get("type") not in _IGNORED_BLOCKS:
            texts.append(_text(block))
    turn: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    return turn | {"tool_calls": calls} if calls else turn


def _asked(message: protocol.Turn) -> Iterator[dict[str, Any]]:
    """A turn of the user's: results of tools, then what is said."""
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
        return
    said = []
    for block in message.content:
        if block.get("type") != "tool_result":
            said.append(block)
            continue
        result = block.get("content") or ""
        if not isinstance(result, str | list):
            raise _wrong("A tool_result's content must be a string or a list of blocks")
        yield {
            "role": "tool",
            "tool_call_id": _field(block, "tool_use_id", str),
            "content": _content(result, "messages"),
        }
    if said:
        yield {"role": message.role, "content": _content(said, "messages")}


def _content(content: str | list[protocol.Block], parameter: str) -> str | list[protocol.Block]:
    if isinstance(content, str):
        return content
    if parameter == "messages" and any(_is_image(block) for block in content):
        return [
            _image(block) if _is_image(block) else {"type": "text", "text": _text(block)} for block in content
        ]
    texts = [_text(block, parameter) for block in content]
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


def _is_image(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == "image"


def _image(block: protocol.Block) -> protocol.Block:
    match block.get("source"):
        case {"type": "base64", "media_type": str(kind), "data": str(data)}:
            url = f"data:{kind};base64,{data}"
        case {"type": "url", "url": str(url)}:
            pass
        case _:
            raise _wrong("An image block needs a source of type base64 (media_type, data) or url (url)")
    return {"type": "image_url", "image_url": {"url": url}}


def _text(block: Any, parameter: str = "messages") -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "text":
        return str(_field(block, "text", str, parameter))
    known = "text, tool_use (of the assistant) and tool_result (of the user) are known"
    reason = _REFUSED_BLOCKS.get(str(kind), known)
    raise _wrong(f"A content block of type {str(kind)[:40]!r} is not supported: {reason}", parameter)


def _field(block: protocol.Block, name: str, kind: type, parameter: str = "messages") -> Any:
    if not isinstance(value := block.get(name), kind):
        raise _wrong(f"A {block['type']} block needs {name} as a JSON {_JSON_NAMES[kind]}", parameter)
    return value


def _tool(tool: protocol.ClientTool) -> ChatTool:
    if tool.type not in (None, "custom"):
        raise _wrong(
            f"A tool of type {tool.type[:40]!r} is not there: describe a tool by name and input_schema, and "
            "run it yourself",
            "tools",
        )
    return ChatTool(Function(tool.name, tool.description, tool.input_schema, tool.strict))


def _choice(choice: protocol.ToolChoice | None) -> Any:
    if choice is None:
        return None
    if choice.type != "tool":
        return _CHOICES[choice.type]
    if choice.name is None:
        raise _wrong("tool_choice of type tool needs a name", "tool_choice")
    return NamedTool(NamedFunction(choice.name))


def _wrong(text: str, parameter: str = "messages") -> RequestError:
    return RequestError(f"{text}.", parameter)
