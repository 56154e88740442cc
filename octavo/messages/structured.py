"""`StructuredOutputsParams`: the form of an output. Public; and what the wings tell each other of grammars.

Names, rules and texts follow vLLM's class of the same name (and its forerunner GuidedDecodingParams). The
front has each new grammar compiled by a checker, a process with limits (`Check` → `Verdict`); what passed
goes to the core as a `Constraint`.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from octavo.base.errors import RequestError

CHECK_PIPE = "checks"
VERDICT_PIPE = "verdicts"
"""Names, in a checker's mailbox, of the pipes to it and from it."""
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
MAX_NESTING = 64
MAX_BYTES = 1 << 20
_NAME = "structured_outputs"
_FLAGS = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties")
_OPTIONAL_FLAGS = ("json_object", "after_reasoning")
_FOREIGN_BACKENDS = ("auto", "guidance", "xgrammar", "outlines", "lm-format-enforcer")
"""Names by which other engines' users choose a back end per request: accepted without effect."""


class StructuredOutputsParams(msgspec.Struct, omit_defaults=True):
    """Exactly one kind of constraint, and options for JSON. Raises RequestError."""

    json: str | dict[str, Any] | bool | None = None
    """A JSON schema, as text, as an object, or a pydantic model."""
    regex: str | None = None
    """The whole output matches it. No look-around, no back references; \\d means 0 to 9."""
    choice: list[str] | None = None
    """The output is one of these."""
    grammar: str | None = None
    """A context-free grammar: GBNF ("root ::= …") or Lark ("start: …")."""
    json_object: bool | None = None
    """True: any JSON object."""
    disable_fallback: bool = False
    """Accepted without effect: there never is a fallback."""
    disable_any_whitespace: bool = False
    """JSON without white space between tokens."""
    disable_additional_properties: bool = False
    """Objects have only the properties that their schema names."""
    whitespace_pattern: str | None = None
    """Regular expression of the white space between JSON tokens; None: a few blanks, or a line break and an
    indent."""
    structural_tag: str | dict[str, Any] | None = None
    """Free text, in which tags begin constrained parts: {structures: [{begin, schema, end}], triggers}."""
    backend: str | None = None
    """Accepted for the sake of GuidedDecodingParams."""
    after_reasoning: bool | None = None
    """The form is that of what follows the reasoning, where the model is known to mark it (reasoning_parser).
    None: in chats over HTTP, which tell the two apart (octavo)."""

    def __post_init__(self) -> None:
        given: Any = self.json
        if isinstance(given, type) and hasattr(given, "model_json_schema"):
            self.json = given.model_json_schema()
        if self.json_object is False:
            self.json_object = None
        self._check_kind()
        self._check_types()
        if self.json is not None:
            self.json = self.json if isinstance(self.json, bool) else _object(self.json, "json")
        if self.structural_tag is not None:
            self.structural_tag = _object(self.structural_tag, "structural_tag")

    @classmethod
    def of(cls, value: object) -> "StructuredOutputsParams":
        """As given, or made of a mapping with the fields. Raises RequestError."""
        if isinstance(value, Mapping):
            if unknown := sorted(map(str, value.keys() - set(cls.__struct_fields__))):
                raise RequestError(f"Unknown fields of structured_outputs: {', '.join(unknown)}.", _NAME)
            return cls(**value)
        if not isinstance(value, cls):
            raise RequestError(
                f"structured_outputs must be StructuredOutputsParams, got {value!r:.200}.", _NAME
            )
        return value

    @property
    def kind(self) -> str:
        """Which of KINDS is given."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    def _check_kind(self) -> None:
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        one = "use one kind of structured outputs constraint but"
        if len(given) > 1:
            raise RequestError(f"You can only {one} multiple are specified: {', '.join(given)}.", _NAME)
        if not given:
            text = f"You must {one} none are specified. Give one of {', '.join(KINDS)}."
            raise RequestError(text, _NAME)

    def _check_types(self) -> None:
        for name in ("regex", "grammar", "whitespace_pattern", "backend"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise _wrong(name, f"must be a string, got {type(value).__name__}")
            if value is not None and not (value.strip() if name == "grammar" else value):
                raise _wrong(name, "cannot be an empty string")
        for name in (*_FLAGS, *_OPTIONAL_FLAGS):
            value = getattr(self, name)
            if not isinstance(value, bool) and (value is not None or name in _FLAGS):
                raise _wrong(name, f"must be True or False, got {value!r}")
        if self.backend not in (None, *_FOREIGN_BACKENDS):
            raise _wrong("backend", f"must be one of {', '.join(_FOREIGN_BACKENDS)}, got {self.backend!r}")
        if self.choice is not None:
            self.choice = _choices(self.choice)
        for text in (self.regex, self.grammar, self.whitespace_pattern, *(self.choice or ())):
            _check_text(text or "", self.kind)
        if sum(map(len, self.choice or [self.regex or self.grammar or ""])) > MAX_BYTES:
            raise _wrong(self.kind, f"may have at most {MAX_BYTES} characters")


GuidedDecodingParams = StructuredOutputsParams
"""vLLM's name of it until 2025."""


class Vocabulary(msgspec.Struct, array_like=True):
    """What the tokens of a model spell; kept in a file that the front writes and others read."""

    tokens: list[bytes]
    """One for each logit; empty where there is none."""
    special_ids: list[int]
    """Tokens that are no text."""
    end_ids: list[int]
    """Tokens that end a text."""


class ReasoningMarks(msgspec.Struct, array_like=True, gc=False):
    """Where reasoning ends that stands before a form."""

    closing_ids: list[int]
    """The form begins after these tokens."""
    opening_ids: list[int] = []
    """It begins with these, as the first of the output or never; none: the prompt has opened it."""


class Constraint(msgspec.Struct, array_like=True, gc=False):
    """The form of one request's output, checked."""

    grammar: str
    """In the words of the back end."""
    vocabulary: str
    """Path of the file; its name says the content."""
    backend: str
    reasoning: ReasoningMarks | None = None
    """What may come before."""


class Check(msgspec.Struct, array_like=True, tag="check"):
    """The front to a checker: can this be compiled, in so many seconds of a processor?"""

    params: StructuredOutputsParams
    limit_s: float


class CheckerReady(msgspec.Struct, array_like=True, tag="ready"):
    """A checker to its front: it listens."""


class Verdict(msgspec.Struct, array_like=True, tag="verdict"):
    """The answer to a Check: the grammar in the words of the back end, or why it is none."""

    grammar: str = ""
    error: str = ""


CheckerAnswer = CheckerReady | Verdict


def _choices(value: object) -> list[str]:
    if not isinstance(value, list | tuple) or not all(isinstance(text, str) for text in value):
        raise _wrong("choice", "must be a list of strings")
    if not value:
        raise _wrong("choice", "cannot be an empty list")
    if "" in value:
        raise _wrong("choice", "cannot contain an empty string")
    return list(dict.fromkeys(value))


def _object(value: object, name: str) -> dict[str, Any]:
    try:
        schema = json.loads(value, parse_constant=_no_constant) if isinstance(value, str) else value
        text = json.dumps(schema, allow_nan=False, ensure_ascii=False)
        _check_text(text, name)
    except RequestError:
        raise
    except RecursionError:
        raise _wrong(name, f"is nested more than {MAX_NESTING} levels deep") from None
    except (TypeError, ValueError):
        raise _wrong(name, "is not valid JSON") from None
    if not isinstance(schema, dict):
        raise _wrong(name, f"must be a JSON object, got {type(schema).__name__}")
    if len(text) > MAX_BYTES:
        raise _wrong(name, f"may have at most {MAX_BYTES} characters, got {len(text)}")
    if any(depth > MAX_NESTING for depth in _depths(schema)):
        raise _wrong(name, f"is nested more than {MAX_NESTING} levels deep")
    return schema


def _depths(schema: Any) -> Iterator[int]:
    """How deep each value lies, without recursion."""
    open_values = [(schema, 1)]
    while open_values:
        value, depth = open_values.pop()
        yield depth
        if depth <= MAX_NESTING and isinstance(value, dict | list):
            inner = value.values() if isinstance(value, dict) else value
            open_values += [(item, depth + 1) for item in inner if isinstance(item, dict | list)]


def _check_text(text: str, name: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _wrong(name, "holds half of a surrogate pair, which is no text") from None


def _no_constant(name: str) -> None:
    raise ValueError(name)


def _wrong(name: str, what: str) -> RequestError:
    return RequestError(f"structured_outputs.{name} {what}.", _NAME)
