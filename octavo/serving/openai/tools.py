"""`ToolUse`: what a chat request wants of tools: what the model is told, what it must say, how that is read.

Made by `chat` from a checked body. Calls that must happen ("required", or a named tool) are constrained to
the tools' schemas, so they cannot fail to parse; with "auto" the model decides, in its own format, and calls
of strict tools are held to their schemas.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal
from uuid import uuid4

import msgspec

from octavo.base.errors import RequestError, wrong
from octavo.frontend.parsers.answer import AnswerParser
from octavo.frontend.parsers.call_object import NamedCallParser, RequiredCallsParser
from octavo.frontend.parsers.registry import REASONING_PARSERS, TOOL_PARSERS
from octavo.frontend.parsers.scanner import Parser
from octavo.frontend.parsers.tagged import TaggedParser
from octavo.frontend.parsers.think import ThinkParser
from octavo.frontend.requests.conversation import ChatRenderer
from octavo.messages.sampling import SamplingParams
from octavo.messages.structured import StructuredOutputsParams
from octavo.serving.openai.protocol import ChatRequest, NamedTool, Tool
from octavo.serving.openai.strict_calls import SPECIAL, reaches_into_reasoning, strict_tag

_NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
"""The arguments of a tool that says nothing of them."""


def call_id() -> str:
    """A new name for a call, by which its result will be known."""
    return f"call_{uuid4().hex[:24]}"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request, and the choice among them."""

    tools: list[Tool]
    """Those the model is told of."""
    mode: Literal["none", "auto", "required", "named"]
    is_parallel: bool

    @classmethod
    def of(cls, body: ChatRequest) -> "ToolUse":
        """Raises RequestError, which names the field."""
        tools, choice = body.tools or [], body.tool_choice
        names = [tool.function.name for tool in tools]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise RequestError(f"Two tools have the name {twice[0]!r}.", "tools")
        mode: Any = ("auto" if tools else "none") if choice is None else choice
        if isinstance(choice, NamedTool):
            tools = [tool for tool in tools if tool.function.name == choice.function.name]
            if not tools:
                raise wrong("tool_choice", f"names {choice.function.name!r}, which is not among the tools")
            mode = "named"
        elif choice == "required" and not tools:
            raise RequestError("tool_choice required needs tools.", "tool_choice")
        if not tools:
            mode = "none"
        return cls(tools, mode, body.parallel_tool_calls is not False)

    def described(self) -> list[dict[str, Any]] | None:
        """The tools as chat templates take them."""
        if self.mode == "none":
            return None
        described: list[dict[str, Any]] = msgspec.to_builtins(self.tools)
        for tool in described:
            function = tool["function"]
            function["parameters"] = function["parameters"] or _NOTHING
            function["description"] = function["description"] or ""
            del function["strict"]
        return described

    def constrained(self, params: SamplingParams, renderer: ChatRenderer) -> SamplingParams:
        """The parameters with what tools and reasoning add. Raises RequestError."""
        changes: dict[str, Any] = {}
        form = params.structured_outputs
        if self.mode in ("required", "named"):
            if form is not None:
                raise RequestError(
                    "A forced tool call and structured_outputs cannot both be had.", "tool_choice"
                )
            schema = self.tools[0].function.parameters or _NOTHING
            if self.mode == "required":
                schema = _calls_schema(self.tools, self.is_parallel)
            form = StructuredOutputsParams(json=schema, disable_additional_properties=True)
        elif form is None and (tag := self._strict_tag(renderer)):
            form = StructuredOutputsParams(
                structural_tag=tag,
                disable_additional_properties=True,
                after_reasoning=False if reaches_into_reasoning(renderer.tool_parser) else None,
            )
        if form is not None:
            reasons = bool(renderer.reasoning_parser) and form.after_reasoning is not False
            form = changes["structured_outputs"] = msgspec.structs.replace(form, after_reasoning=reasons)
        if any(kind.shows_special_tokens for kind in self._kinds(form, renderer)):
            changes["skip_special_tokens"] = False
        return msgspec.structs.replace(params, **changes) if changes else params

    def parser(
        self,
        prompt: str,
        *,
        renderer: ChatRenderer,
        params: SamplingParams,
        note: Callable[[bool], object] | None = None,
    ) -> AnswerParser | None:
        """For one answer to this prompt; None when its text is all there is to it.

        note: told whether there were calls, where they were looked for
        """
        parsers = [self._opened(kind, prompt) for kind in self._kinds(params.structured_outputs, renderer)]
        if self.mode == "named":
            parsers.append(NamedCallParser(self.tools[0].function.name))
        elif self.mode == "required":
            parsers.append(RequiredCallsParser())
        return AnswerParser(parsers, note if self.mode != "none" else None) if parsers else None

    def _kinds(self, form: StructuredOutputsParams | None, renderer: ChatRenderer) -> list[type[Parser]]:
        """The parsers of what is written freely: of reasoning, of calls; one that does both is enough."""
        kinds: list[type[Parser]] = []
        if renderer.reasoning_parser and (form is None or form.after_reasoning):
            kinds.append(REASONING_PARSERS.load(renderer.reasoning_parser))
        is_free = form is None or SPECIAL in (form.structural_tag or "")
        if self.mode == "auto" and renderer.tool_parser and is_free:
            kinds.append(TOOL_PARSERS.load(renderer.tool_parser))
        return list(dict.fromkeys(kinds))

    def _strict_tag(self, renderer: ChatRenderer) -> dict[str, Any] | None:
        """What holds the calls of strict tools to their schemas, where the model need not call."""
        if self.mode != "auto" or not renderer.tool_parser:
            return None
        functions = [tool.function for tool in self.tools]
        return strict_tag(
            functions,
            renderer.tool_parser,
            renderer.special_tokens,
            level=renderer.tool_strict_level,
            is_parallel=self.is_parallel,
        )

    def _opened(self, kind: type[Parser], prompt: str) -> Parser:
        if issubclass(kind, ThinkParser):
            return kind(prompt)
        if issubclass(kind, TaggedParser):
            return kind({tool.function.name: tool.function.parameters for tool in self.tools})
        return kind()


def _calls_schema(tools: list[Tool], is_parallel: bool) -> dict[str, Any]:
    """A list of calls, at least one, each of one of the tools."""
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": []}}
    if not is_parallel:
        schema["maxItems"] = 1
    for index, tool in enumerate(tools):
        place = f"#/items/anyOf/{index}/properties/parameters"
        call = {
            "name": {"const": tool.function.name},
            "parameters": _moved(tool.function.parameters or _NOTHING, place),
        }
        schema["items"]["anyOf"].append(
            {"type": "object", "properties": call, "required": [*call], "additionalProperties": False}
        )
    return schema


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references to itself are right where it stands now."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: place + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, place)
        for key, value in schema.items()
    }
