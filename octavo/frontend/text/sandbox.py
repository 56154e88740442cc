"""`SANDBOX`: the Jinja environment that chat templates run in.

Used by `chat_template` only. A template comes from a model file, so it is untrusted: it runs in Jinja's
immutable sandbox, its time is bounded, and so is the text that it handles on its way, for a few steps can
double a string until memory is gone. What templates may use beside Jinja itself follows transformers:
raise_exception, strftime_now, tojson, break/continue, {% generation %}.
"""

import json
import math
import re
import threading
import time
from collections.abc import Callable
from datetime import datetime
from functools import wraps
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.visitor
from jinja2.exceptions import SecurityError

MAX_WORK = 2**28
"""Characters that one rendering may write, join, repeat and copy, on its way to a text."""
_PER_ITEM, _PER_VALUE = 8, 256
"""What a place in a list counts, and what writing a value does beside its characters."""
_MAX_FACTOR = 2**20
_MAX_INTEGER_BITS = 4096
_GROWING_FILTERS = ("batch", "center", "indent", "replace", "round", "slice", "wordwrap")
_GROWING_METHODS = ("center", "expandtabs", "ljust", "replace", "rjust", "zfill")
_WRITING_FILTERS = ("format", "join", "pprint", "string", "tojson", "urlencode", "xmlattr")
_SIZED = (str, list, tuple, dict)
_WIDTH = re.compile(r"[%{].*(\d{5}|\*)|\{\w*:[^{}]*\{", re.DOTALL)
"""In a format: one larger than anybody needs, or told by an argument."""


class _Allowance(threading.local):
    """What the rendering of this thread may still take."""

    seconds = end_s = math.inf
    left = MAX_WORK


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a clock and a meter.

    Every pass of a loop and every call of a macro begins by looking at both; nothing else repeats. All that
    makes large values out of small ones is charged.
    """

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, **options: Any) -> None:
        self._run = _Allowance()
        super().__init__(finalize=self._charged, **options)
        self.filters["tojson"] = _to_json
        for name in _GROWING_FILTERS:
            self.filters[name] = self._guarded(self.filters[name], self._charge_product)
        for name in _WRITING_FILTERS:
            self.filters[name] = self._guarded(self.filters[name], self._charge_contents)
        self.filters["format"] = self._guarded(
            self.filters["format"], lambda layout, *_: _check_width(layout)
        )
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now}

    def allow(self, seconds: float) -> None:
        """The template that this thread renders next may take so long from now."""
        self._run.end_s, self._run.seconds, self._run.left = time.monotonic() + seconds, seconds, MAX_WORK

    def tick(self, size: int) -> None:
        """Called by compiled templates where something repeats that writes `size` characters of its own.

        Raises SecurityError when the time is over.
        """
        if time.monotonic() > self._run.end_s:
            raise SecurityError(f"it did not come to its end in {self._run.seconds:g} s")
        self._charge(size)

    def concatenate(self, *values: Any) -> str:
        """The operator ~, called by compiled templates."""
        self._charge_contents(*values)
        return "".join(map(str, values))

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Called for the operators that can make much out of little."""
        match operator, left, right:
            case "**", _, _:
                raise SecurityError("powers may be too large")
            case "*", int(), int():
                if left.bit_length() + right.bit_length() > _MAX_INTEGER_BITS:
                    raise SecurityError("an integer is too large")
            case "*", _, _:
                self._charge_product("*", left, right)
            case "+", str(), str():
                self._charge(len(left) + len(right))
            case "+", list() | tuple(), list() | tuple():
                self._charge(_PER_ITEM * (len(left) + len(right)))
            case "%", str(), _:
                self._charge_contents(left, right)
                _check_width(left)
        return super().call_binop(context, operator, left, right)

    def call(self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Called for every call of a function or method."""
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str) and name == "translate":
            raise SecurityError("a text cannot be translated: replace parts of it")
        if isinstance(owner, str) and name in _GROWING_METHODS:
            self._charge_product(owner, *args, *kwargs.values())
        elif isinstance(owner, str) and name == "join":
            args = tuple(map(_as_listed, args))
            self._charge_contents(*args)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`format` of a string, when it is looked up."""
        owner = getattr(value, "__self__", None)
        if isinstance(owner, str) and getattr(value, "__name__", "") in ("format", "format_map"):
            _check_width(owner)
        return super().wrap_str_format(value)

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree: jinja2.nodes.Template = _Concatenations(self).visit(super()._parse(source, name, filename))
        repeated: list[jinja2.nodes.For | jinja2.nodes.Macro | jinja2.nodes.CallBlock] = [
            *tree.find_all(jinja2.nodes.For),
            *tree.find_all(jinja2.nodes.Macro),
            *tree.find_all(jinja2.nodes.CallBlock),
        ]
        for node in repeated:
            size = sum(len(text.data) for text in node.find_all(jinja2.nodes.TemplateData))
            call = _own_method(self, "tick", [jinja2.nodes.Const(size)], node.lineno)
            node.body.insert(0, jinja2.nodes.ExprStmt(call).set_lineno(node.lineno).set_environment(self))
        return tree

    def _guarded(self, function: Callable[..., Any], charge: Callable[..., None]) -> Callable[..., Any]:
        """The filter, charged for what it is given."""
        num_passed = 1 if hasattr(function, "jinja_pass_arg") else 0  # by Jinja, in front

        @wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            values = [_as_listed(value) for value in args]
            charge(*values[num_passed:], *kwargs.values())
            return function(*values, **kwargs)

        return guarded

    def _charged(self, value: Any) -> Any:
        """What is written, at any place."""
        self._charge_contents(value)
        return value

    def _charge(self, size: int) -> None:
        self._run.left -= size
        if self._run.left < 0:
            raise SecurityError(f"it handles more than {MAX_WORK} characters")

    def _charge_product(self, subject: Any, *factors: Any) -> None:
        """A number repeats, and a text may be put in the place of every character of another."""
        size = len(subject) if isinstance(subject, _SIZED) else 1
        for value in factors:
            factor = value if isinstance(value, int) else len(value) if isinstance(value, _SIZED) else 1
            if isinstance(value, int) and factor > _MAX_FACTOR:
                raise SecurityError(f"a number is larger than {_MAX_FACTOR}")
            size *= max(1, factor)
        self._charge(size)

    def _charge_contents(self, *values: Any) -> None:
        """All texts in these values are written out, as often as they occur."""
        rest = list(values)
        while rest:
            value = rest.pop()
            self._charge(_PER_VALUE + (len(value) if isinstance(value, str) else 0))
            if isinstance(value, dict):
                rest += [*value.keys(), *value.values()]
            elif isinstance(value, list | tuple):
                rest += value


class _Concatenations(jinja2.visitor.NodeTransformer):
    """Has a sandbox join what the operator ~ joins."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        """Called for each."""
        self.generic_visit(node)
        return _own_method(self._sandbox, "concatenate", node.nodes, node.lineno)


class _Generation(jinja2.ext.Extension):
    """{% generation %} … {% endgeneration %} marks what the model wrote, for training; here it is ignored."""

    tags = {"generation"}  # noqa: RUF012  # Jinja's interface

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _own_method(sandbox: Sandbox, name: str, arguments: list[Any], line: int) -> jinja2.nodes.Expr:
    """A call that a template cannot write itself."""
    method = jinja2.nodes.EnvironmentAttribute(name)
    call = jinja2.nodes.Call(method, arguments, [], None, None)
    call.set_lineno(line).set_environment(sandbox)
    return call


def _as_listed(value: Any) -> Any:
    """A list of what comes only once."""
    return list(value) if hasattr(value, "__next__") else value


def _check_width(layout: str) -> None:
    if _WIDTH.search(layout):
        raise SecurityError("a format is too wide")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if indent is not None and indent > 16:
        raise SecurityError("tojson: indent is larger than 16")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> str:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


SANDBOX = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
