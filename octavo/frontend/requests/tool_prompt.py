"""`with_tool_prompt`: tools for models whose chat template knows none, told in words (option `tool_prompt`).

Called by `conversation`. The form is that of Hermes and Qwen 2.5, the most widely learnt one; the parser
`hermes` reads what the model says in it.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]
PARSER = "hermes"
_FORM = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> \
XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def with_tool_prompt(
    messages: Sequence[Message], tools: Sequence[Any] | None, *, as_system: bool = True
) -> list[Message]:
    """The conversation in plain words: the tools in its system message, calls and results as text.

    as_system: False where the template knows no system message: the tools stand before the first turn
    """
    told = _with_results_joined([_in_words(message) for message in messages])
    if not tools:
        return told
    text = _FORM.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    first = told[0].get("role") if told and isinstance(told[0], Mapping) else None
    if not as_system and first == "user":
        return [{**told[0], "content": _joined(text, told[0].get("content"), "\n\n")}, *told[1:]]
    if as_system and first in ("system", "developer"):
        return [{**told[0], "content": _joined(told[0].get("content"), text, "\n\n")}, *told[1:]]
    return [{"role": "system" if as_system else "user", "content": text}, *told]


def _with_results_joined(messages: Sequence[Message]) -> list[Message]:
    """Results of calls that were made together are one turn: many templates want turns to alternate."""
    joined: list[Message] = []
    for message in messages:
        is_result = isinstance(message, Mapping) and message.get("role") == "tool"
        if is_result and joined and isinstance(joined[-1], Mapping) and joined[-1].get("role") == "tool":
            content = _joined(joined[-1].get("content"), message.get("content"), "\n")
            joined[-1] = {"role": "tool", "content": content}
        else:
            joined.append(message)
    return [
        {**m, "role": "user"} if isinstance(m, Mapping) and m.get("role") == "tool" else m for m in joined
    ]


def _in_words(message: Any) -> Any:
    if not isinstance(message, Mapping):
        return message  # which the template will not take
    calls = message.get("tool_calls")
    if message.get("role") == "tool":
        content = _joined(_joined("<tool_response>", message.get("content"), "\n"), "</tool_response>", "\n")
        return {"role": "tool", "content": content}  # the user's, once those of one turn are joined
    if isinstance(calls, list) and calls:
        text = "\n".join(f"<tool_call>\n{_call(call)}\n</tool_call>" for call in calls)
        rest = {name: value for name, value in message.items() if name != "tool_calls"}
        return {**rest, "content": _joined(message.get("content"), text, "\n")}
    return message


def _call(call: Any) -> str:
    function = call.get("function") if isinstance(call, Mapping) else None
    function = function if isinstance(function, Mapping) else {}
    given = function.get("arguments") or "{}"
    arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    return f'{{"name": {json.dumps(function.get("name"), ensure_ascii=False)}, "arguments": {arguments}}}'


def _joined(first: Any, second: Any, between: str) -> Any:
    if not first or not second:
        return first or second
    if isinstance(first, str) and isinstance(second, str):
        return first + between + second
    parts = [[part] if isinstance(part, str) else part for part in (first, second)]
    return [*parts[0], *parts[1]] if all(isinstance(part, list) for part in parts) else first
