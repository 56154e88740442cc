"""`TemplateTraits`: what a chat template expects of messages, read off its syntax tree.

Used by `chat_template`. Families differ in the form of content and of a call's arguments, and a template says
nowhere which it takes; it shows in what it does with them.
"""

from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Literal

from jinja2 import nodes

_DATA_FILTERS = ("tojson", "items", "dictsort", "string")


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """Of one template."""

    variables: Set[str]
    """Names that it reads, its own among them: to tell these apart, Jinja would compute constants."""
    content_format: Literal["string", "openai"]
    """ "openai" when it goes through the parts of a message's content."""
    tells_missing_content: bool
    """It asks whether content is none; others would print the word."""
    takes_arguments_as_text: bool
    """It prints the arguments of calls as they are."""
    knows_developer: bool
    """It has a word for the role "developer"."""

    @classmethod
    def of(cls, tree: nodes.Template) -> "TemplateTraits":
        """Of a template that was parsed."""
        contents = _aliases(tree, "content")
        tests = tree.find_all(nodes.Test)
        return cls(
            variables={name.name for name in tree.find_all(nodes.Name) if name.ctx == "load"},
            content_format="openai"
            if any(_reads(loop.iter, "content", contents) for loop in tree.find_all(nodes.For))
            else "string",
            tells_missing_content=any(
                test.name == "none" and _reads(test.node, "content", contents) for test in tests
            ),
            takes_arguments_as_text=_prints_arguments(tree),
            knows_developer=any("developer" in str(word.value) for word in tree.find_all(nodes.Const)),
        )

    @property
    def knows_tools(self) -> bool:
        """Whether tools can be shown to the model."""
        return "tools" in self.variables


def _prints_arguments(tree: nodes.Template) -> bool:
    """True when arguments are printed or joined to text, and never treated as data."""
    names = _aliases(tree, "arguments")
    if any(
        filtered.name in _DATA_FILTERS and filtered.node and _reads(filtered.node, "arguments", names)
        for filtered in tree.find_all(nodes.Filter)
    ) or any(_reads(loop.iter, "arguments", names) for loop in tree.find_all(nodes.For)):
        return False
    return any(_reads(node, "arguments", names) for node in _printed(tree))


def _printed(tree: nodes.Template) -> Iterator[nodes.Node]:
    for output in tree.find_all(nodes.Output):
        yield from output.nodes
    for joined in tree.find_all(nodes.Concat):
        yield from joined.nodes
    for added in tree.find_all(nodes.Add):
        yield from (added.left, added.right)


def _aliases(tree: nodes.Template, field: str) -> set[str]:
    """Names that stand for a field of a message: {% set content = message['content'] %}."""
    names: set[str] = set()
    for node in tree.find_all(nodes.Assign):
        if isinstance(node.target, nodes.Name) and _reads(node.node, field, names):
            names.add(node.target.name)
    return names


def _reads(node: nodes.Node, field: str, aliases: Set[str]) -> bool:
    """True for message[field], message.field, an alias of it, and these with a filter or slice."""
    match node:
        case nodes.Getattr(attr=attribute):
            return bool(attribute == field)
        case nodes.Getitem(arg=nodes.Const(value=value)):
            return bool(value == field)
        case nodes.Name(name=name):
            return name in aliases
        case nodes.Filter(node=nodes.Node() as inner) | nodes.Getitem(node=inner, arg=nodes.Slice()):
            return _reads(inner, field, aliases)
        case nodes.CondExpr(expr1=first):
            return _reads(first, field, aliases)
    return False
