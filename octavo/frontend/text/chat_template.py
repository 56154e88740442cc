"""`ChatTemplate`: turns a conversation into the text of a prompt, by the Jinja template a model brings.

Called by `Tokenizer.apply_chat_template`. A template comes from a model file, so it is untrusted: it runs in
Jinja's immutable sandbox, sees plain data only, and its output and its time are bounded. What templates may
use beside Jinja itself follows transformers: raise_exception, strftime_now, tojson, break/continue,
{% generation %}.
"""

import json
import threading
import time
from collections.abc import Mapping, Sequence, Set
from datetime import datetime
from functools import cached_property
from typing import Any, Literal

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
from jinja2.exceptions import SecurityError

from octavo.base import faults
from octavo.base.errors import RequestError

ContentFormat = Literal["auto", "string", "openai"]
MAX_OUTPUT_CHARS = 16 * 1024 * 1024
MAX_RENDER_S = 10.0
_MAX_REPEATED = 1024 * 1024
_RESERVED = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"} | {
    *("tokenize", "chat_template", "raise_exception", "strftime_now", "tojson"),
    *("bos_token", "eos_token", "pad_token", "unk_token"),
}
_MARK = "\N{INVISIBLE SEPARATOR}octavo continues here\N{INVISIBLE SEPARATOR}"


class ChatTemplate:
    """A compiled template. Immutable; compiled on first use."""

    def __init__(self, source: str) -> None:
        self.source = source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        content_format: ContentFormat = "auto",
        special_tokens: Mapping[str, str] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of `messages`. Raises RequestError for a conversation that the template refuses.

        continue_final_message: the prompt ends inside the last message, so that the model goes on with it
        content_format:         how the template reads content: one string, or OpenAI's list of parts
        chat_template_kwargs:   further variables of the template (enable_thinking …), as far as it reads them
        """
        extra = _check_extra(chat_template_kwargs or {}, self.variables)
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other: set one to False.",
                "continue_final_message",
            )
        parts = self.content_format == "openai" if content_format == "auto" else content_format == "openai"
        conversation = [_message(message, as_parts=parts) for message in messages]
        if continue_final_message:
            _mark_final(conversation)
        text = self._run(
            extra
            | dict(special_tokens or {})
            | {
                "messages": conversation,
                "tools": _plain(tools, "tools"),
                "documents": _plain(documents, "documents"),
                "add_generation_prompt": add_generation_prompt,
            }
        )
        return _cut_at_mark(text) if continue_final_message else text

    @cached_property
    def variables(self) -> Set[str]:
        """The names that the template reads and that are neither its own nor Jinja's."""
        try:
            names = jinja2.meta.find_undeclared_variables(SANDBOX.parse(self.source))
        except jinja2.TemplateError as error:
            raise RequestError(f"The chat template is not valid Jinja: {error}", "chat_template") from None
        return names - SANDBOX.globals.keys()

    @cached_property
    def content_format(self) -> ContentFormat:
        """ "openai" when the template goes through the parts of a message's content, else "string"."""
        try:
            tree = SANDBOX.parse(self.source)
        except jinja2.TemplateError as error:
            raise RequestError(f"The chat template is not valid Jinja: {error}", "chat_template") from None
        loops = tree.find_all(jinja2.nodes.For)
        return "openai" if any(_reads_content(loop.iter, _aliases(tree)) for loop in loops) else "string"

    @cached_property
    def _compiled(self) -> jinja2.Template:
        try:
            return SANDBOX.from_string(self.source)
        except jinja2.TemplateError as error:
            raise RequestError(f"The chat template is not valid Jinja: {error}", "chat_template") from None

    def _run(self, variables: dict[str, Any]) -> str:
        faults.hit("template")
        template = self._compiled
        pieces, size = [], 0
        SANDBOX.allow(MAX_RENDER_S)
        try:
            for piece in template.generate(variables):
                size += len(piece)
                if size > MAX_OUTPUT_CHARS:
                    raise RequestError(
                        f"The chat template wrote more than {MAX_OUTPUT_CHARS} characters.", "messages"
                    )
                pieces.append(piece)
        except jinja2.TemplateError as error:
            raise RequestError(f"The chat template refused the conversation: {error}", "messages") from None
        except (
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            RecursionError,
            MemoryError,
        ) as error:
            if isinstance(error, RequestError):
                raise
            raise RequestError(
                f"The chat template failed on this conversation ({type(error).__name__}).", "messages"
            ) from error
        return "".join(pieces)


def _check_extra(extra: Mapping[str, Any], known: Set[str]) -> dict[str, Any]:
    """What the template reads of `extra`; the rest would have no effect."""
    if taken := sorted(_RESERVED & extra.keys()):
        raise RequestError(
            f"chat_template_kwargs may not set {', '.join(taken)}: give the argument of that name instead.",
            "chat_template_kwargs",
        )
    plain = {name: _plain(value, "chat_template_kwargs") for name, value in extra.items()}
    return {name: plain[name] for name in plain.keys() & known}


def _plain(value: Any, parameter: str) -> Any:
    """A deep copy as JSON data: what a template is given has no methods of ours and no ties to the caller."""
    if value is None:
        return None
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{parameter} must be plain data (JSON types): {error}", parameter) from None


def _message(message: Mapping[str, Any], *, as_parts: bool) -> dict[str, Any]:
    """A copy of `message` with its content in the form the template reads."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"Each message must be an object with a 'role', got {message!r:.200}.", "messages")
    copy: dict[str, Any] = _plain(dict(message), "messages")
    content = copy.get("content")
    if isinstance(content, list):
        texts = [_part_text(part) for part in content]
        copy["content"] = [{"type": "text", "text": t} for t in texts] if as_parts else "\n".join(texts)
    elif isinstance(content, str):
        copy["content"] = [{"type": "text", "text": content}] if as_parts else content
    elif content is not None:
        raise RequestError(
            f"A message's content must be a string or a list of parts, got {type(content).__name__}.",
            "messages",
        )
    return copy


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("text", "input_text", "output_text", "refusal", "thinking"):
        text = part.get("text", part.get(kind))
        if isinstance(text, str):
            return text
    raise RequestError(
        f"A content part of type {kind!r} cannot be used: only {{'type': 'text', 'text': …}} is supported.",
        "messages",
    )


def _mark_final(conversation: list[dict[str, Any]]) -> None:
    """Put the mark after the last message's text; the space behind it tells whether the template trims."""
    holder: Any = conversation[-1] if conversation else None
    key = "content"
    if holder and isinstance(holder.get("content"), list) and holder["content"]:
        holder, key = holder["content"][-1], "text"
    if not holder or not isinstance(holder.get(key), str):
        raise RequestError("continue_final_message needs a last message with text to continue.", "messages")
    holder[key] += _MARK + " "


def _cut_at_mark(text: str) -> str:
    """`text` up to the mark; when the template trims content, the spaces before the mark go too."""
    before, found, after = text.rpartition(_MARK)
    if not found:
        raise RequestError(
            "continue_final_message is set, but the chat template does not print the last message's content.",
            "continue_final_message",
        )
    return before if after.startswith(" ") else before.rstrip()


def _aliases(tree: jinja2.nodes.Template) -> set[str]:
    """Names that stand for a message's content: {% set content = message['content'] %}."""
    names: set[str] = set()
    for node in tree.find_all(jinja2.nodes.Assign):
        if isinstance(node.target, jinja2.nodes.Name) and _reads_content(node.node, names):
            names.add(node.target.name)
    return names


def _reads_content(node: jinja2.nodes.Node, aliases: set[str]) -> bool:
    """True for message['content'], message.content, an alias of it, and these with a filter or slice."""
    match node:
        case jinja2.nodes.Getattr(attr="content"):
            return True
        case jinja2.nodes.Getitem(arg=jinja2.nodes.Const(value="content")):
            return True
        case jinja2.nodes.Name(name=name):
            return name in aliases
        case (
            jinja2.nodes.Filter(node=jinja2.nodes.Node() as inner)
            | jinja2.nodes.Getitem(node=inner, arg=jinja2.nodes.Slice())
        ):
            return _reads_content(inner, aliases)
        case jinja2.nodes.CondExpr(expr1=first):
            return _reads_content(first, aliases)
    return False

