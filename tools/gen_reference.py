"""Reference pages made from the code, for tools/gen_docs.py: commands, HTTP routes, Python API."""

import argparse
import ast
import dataclasses
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import msgspec

import octavo
from octavo.base.errors import OctavoError
from octavo.cli.main import COMMANDS, make_parser
from octavo.config.args import EngineArgs
from octavo.config.server import ServerConfig
from octavo.serving.openai.protocol import RequestFields, SamplingFields
from octavo.serving.openapi import describe_api
from octavo.serving.registry import Route, load_routes

NOTE = "<!-- Written by tools/gen_docs.py; change the code, not this page. -->"
_OPTIONS = {field.name for kind in (EngineArgs, ServerConfig) for field in dataclasses.fields(kind)}
_ADDRESS = "http://127.0.0.1:8000"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "What is the capital of France?"}]},
    "/v1/chat/completions/batch": {
        "messages": [
            [{"role": "user", "content": "Name a colour."}],
            [{"role": "user", "content": "Name a fish."}],
        ],
        "max_tokens": 8,
    },
    "/v1/responses": {"input": "What is the capital of France?", "max_output_tokens": 16},
    "/v1/messages": {
        "max_tokens": 16,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
    },
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "How many tokens is this?"}]},
    "/tokenize": {"prompt": "The sea is"},
    "/detokenize": {"tokens": [504, 3575]},
    "/generate": {"prompt": "The sea is", "max_tokens": 8},
    "/generate_stream": {"prompt": "The sea is", "max_tokens": 8},
}
"""Bodies of the examples, by path; tests send each to a server. Without `model` the served one answers."""
_SHARED = SamplingFields.__struct_fields__
_CLASSES = {
    "Engines": "LLM AsyncLLM LLMEngine",
    "Parameters": """SamplingParams StructuredOutputsParams BeamSearchParams RepetitionDetectionParams
        RequestOutputKind""",
    "Prompts": "TextPrompt TokensPrompt EmbedsPrompt StreamingInput",
    "Outputs": """RequestOutput CompletionOutput Logprob FlatLogprobs BeamSearchOutput BeamSearchSequence""",
    "Extensions": "LogitsProcessor AdapterLogitsProcessor ModelRegistry",
}


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def commands() -> str:
    """Every command with its examples and the flags that no other page lists."""
    return "\n\n".join(part for name in COMMANDS for part in _command(name))


def http_page() -> str:
    """Every documented route: what it takes, an example."""
    document = describe_api(strict=True)
    parts = ["# HTTP routes", NOTE]
    parts.append(
        "Every route of `octavo serve`. [The server](../server.md) explains the fields and the errors. "
        "A running server shows the same at /docs, and as a document at /openapi.json."
    )
    group = ""
    for route in load_routes():
        if isinstance(route, Route) and route.documented:
            if route.group != group:
                group = route.group
                parts.append(f"## {group}")
            parts += _route(route, document)
    schema = msgspec.json.schema_components([SamplingFields])[1]["SamplingFields"]["properties"]
    rows = [
        (f"`{n}`", _kind(schema[n]), doc)
        for kind in (RequestFields, SamplingFields)
        for n, _, _, doc in _fields(kind)
    ]
    parts += [
        "## Sampling fields",
        "Every request for text takes these. Names that `SamplingParams` has mean "
        "the same there: [Python API](python.md#samplingparams).",
        table(("field", "type", "meaning"), rows),
    ]
    return "\n\n".join(parts) + "\n"


def python_page() -> str:
    """Every public name."""
    names = {name: getattr(octavo, name) for name in octavo.__all__}
    parts = ["# Python API", NOTE]
    parts.append(
        "Everything that `from octavo import …` offers. Names and arguments are vLLM's; "
        "[Compatibility](../compatibility.md) says where they differ. Options of an engine are on their own "
        "page: [Options](../config.md)."
    )
    for title, listed in _groups(names).items():
        parts.append(f"## {title}")
        for name in listed:
            parts += _class(name, names[name])
    errors = [(n, c) for n, c in names.items() if _is_error(c)]
    rows = [(f"`{n}`", f"`{c.__bases__[-1].__name__}`", _first(c)) for n, c in errors]
    parts += ["## Errors", table(("error", "is a", "when"), rows)]
    parts += ["## Other names", table(("name", "meaning"), _others(names))]
    return "\n\n".join(parts) + "\n"


def _command(name: str) -> Iterator[str]:
    parser = make_parser(name)
    yield f"### octavo {name}"
    yield textwrap.dedent(parser.description or "").strip()
    if parser.epilog:
        yield "```sh\n" + textwrap.dedent(parser.epilog.removeprefix("examples:\n")) + "\n```"
    options = [action for action in parser.options() if not isinstance(action, argparse._HelpAction)]
    takes_all = {field.name for field in dataclasses.fields(EngineArgs)} <= {a.dest for a in options}
    own = [action for action in options if not takes_all or action.dest not in _OPTIONS]
    rows = [(_flag(action), (action.help or "").replace("%%", "%")) for action in own]
    if rows:
        yield table(("argument", "meaning"), rows)
    if takes_all:
        yield f"`octavo {name}` also takes the [options](config.md)" + (
            " of the engine and of the server." if name == "serve" else " of the engine."
        )


def _flag(action: argparse.Action) -> str:
    return ", ".join(f"`{flag}`" for flag in action.option_strings) or f"`{action.metavar or action.dest}`"


def _route(route: Route, document: dict[str, Any]) -> Iterator[str]:
    path = re.sub(r":\w+(?=})", "", route.path)
    methods = ", ".join(route.methods)
    yield f"### {methods} {path}"
    yield inspect.getdoc(route.handler) or ""
    if (body := BODIES.get(path)) is not None:
        yield (
            f"```sh\ncurl {_ADDRESS}{path} -H 'Content-Type: application/json' \\\n"
            f"  -d '{json.dumps(body)}'\n```"
        )
    elif route.methods == ("GET",) and "{" not in path:
        yield f"```sh\ncurl {_ADDRESS}{path}\n```"
    if route.request_model is not None:
        schema = document["components"]["schemas"][route.request_model.__name__]
        fields = [name for name in schema["properties"] if name in schema.get("required", ())]
        others = [name for name in route.request_model.__struct_fields__ if name not in (*fields, *_SHARED)]
        needed = [f"Required: {_names(fields)}."] if fields else []
        shared = issubclass(route.request_model, SamplingFields)
        needed += [
            f"Optional: {_names(others)}{', and the [sampling fields](#sampling-fields)' * shared}."
        ] * bool(others)
        yield " ".join(needed)


def _kind(schema: dict[str, Any]) -> str:
    """A field's type and range in words; null is left out."""
    options = [one for one in schema.get("anyOf", [schema]) if one.get("type") != "null"]
    words = []
    for one in options:
        bounds = {
            "≥": one.get("minimum"),
            ">": one.get("exclusiveMinimum"),
            "≤": one.get("maximum"),
        }
        told = [
            f"{sign} {bound}"
            for sign, bound in bounds.items()
            if bound is not None and abs(bound) < 2**31 - 1
        ]
        named = one.get("type") or " or ".join(map(str, one.get("enum", ["object"])))
        words.append(" ".join([named, " and ".join(told)]).strip())
    return ", or ".join(dict.fromkeys(words))


def _names(fields: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in fields)


def _class(name: str, kind: type) -> Iterator[str]:
    yield f"### {name}"
    yield from _doc(kind)
    if rows := [(f"`{n}`", f"`{t}`", d and f"`{d}`", doc) for n, t, d, doc in _fields(kind)]:
        yield table(("field", "type", "default", "meaning"), rows)
    for member, value in _members(kind).items():
        function = inspect.unwrap(getattr(value, "__func__", value))
        if inspect.isfunction(function) and not member.startswith("_") and inspect.getdoc(function):
            yield f"#### {name}.{member}"
            yield f"`{'await ' * inspect.iscoroutinefunction(value)}{_signature(function)}`"
            yield from _doc(function)


def _members(kind: type) -> dict[str, Any]:
    """What a class has of its own, after what it has of octavo's classes that are not public themselves."""
    bases = [base for base in reversed(kind.__mro__[1:]) if base.__module__.startswith("octavo.")]
    mixed_in = [base for base in bases if base.__name__ not in octavo.__all__]
    return {name: value for part in [*mixed_in, kind] for name, value in vars(part).items()}


def _doc(thing: Any) -> Iterator[str]:
    """The first paragraph as prose, the rest as it is laid out."""
    first, _, rest = (inspect.getdoc(thing) or "").partition("\n\n")
    yield " ".join(first.split()).replace("<", "&lt;")
    if rest.strip():
        yield f"```text\n{rest.strip()}\n```"


def _first(thing: Any) -> str:
    return next(_doc(thing))


def _signature(function: Any) -> str:
    node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    before = node.args.posonlyargs or node.args.args
    del before[:1]
    returns = f" → {ast.unparse(node.returns)}" if node.returns else ""
    return f"{node.name}({ast.unparse(node.args)}){returns}"


def _fields(kind: type) -> Iterator[tuple[str, str, str, str]]:
    """Annotated names of a class with the docstrings below them; none for those that say nothing."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(tree, ast.ClassDef)
    for node, after in zip(tree.body, [*tree.body[1:], ast.Pass()], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            told = after.value if isinstance(after, ast.Expr) else None
            text = " ".join(str(told.value).split()) if isinstance(told, ast.Constant) else ""
            default = ast.unparse(node.value) if node.value is not None else ""
            if not node.target.id.startswith("_") and "ClassVar" not in ast.unparse(node.annotation):
                yield node.target.id, ast.unparse(node.annotation), default, text


def _groups(names: dict[str, Any]) -> dict[str, list[str]]:
    """Classes by heading; those that `_CLASSES` does not place come last."""
    groups = {title: listed.split() for title, listed in _CLASSES.items()}
    told = {*_OTHER, *(name for listed in groups.values() for name in listed)}
    rest = [name for name, value in names.items() if name not in told and not _is_error(value)]
    more = [name for name in rest if not _first_name(name, names)]
    return groups | ({"Other classes": more} if more else {})


def _is_error(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, OctavoError)


def _first_name(name: str, names: dict[str, Any]) -> str:
    """The name under which a class is explained, if `name` is its second one."""
    placed = " ".join(_CLASSES.values()).split()
    return next((n for n in (*placed, "EngineArgs") if names[n] is names[name] and n != name), "")


def _others(names: dict[str, Any]) -> list[tuple[str, str]]:
    """Second names, types and the version."""
    seconds = {name: first for name in names if name not in _OTHER and (first := _first_name(name, names))}
    rows = [(f"`{name}`", f"Another name of `{first}`.") for name, first in seconds.items()]
    return rows + [(f"`{name}`", meaning) for name, meaning in _OTHER.items()]


_OTHER = {
    "EngineArgs": "The [options](../config.md) of an engine as one object.",
    "PromptType": "A text, a list of token ids, or one of the prompts above.",
    "GuidedDecodingParams": "The earlier form of `StructuredOutputsParams`.",
    "__version__": "The version of octavo.",
}
