"""The back end over llguidance, with single bytes as tokens: what it admits and what it refuses."""

import re

import numpy as np
import pytest

from octavo.base.errors import RequestError
from octavo.engine.structured import guidance
from octavo.engine.structured.guidance import GuidanceBackend
from octavo.messages.structured import StructuredOutputsParams
from tests.structured import BYTES, EOS

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
}
POINT = {"type": "object", "properties": {"x": {"type": "integer"}}}
NESTED = {
    "type": "object",
    "properties": {
        "at": {"$ref": "#/$defs/point"},
        "free": {"type": "object"},
        "open": {**POINT, "additionalProperties": True},
        "properties": POINT,
    },
    "required": ["at"],
    "$defs": {"point": POINT},
}
BOTH = {
    "allOf": [{"$ref": "#/$defs/point"}, {"type": "object", "properties": {"y": {"type": "integer"}}}],
    "$defs": {"point": POINT},
}
CALL = {"type": "object", "properties": {"a": {"type": "integer"}}}
TAG = {"structures": [{"begin": "<f=x>", "schema": CALL, "end": "</f>"}], "triggers": ["<f="]}


@pytest.fixture(scope="module")
def backend():
    return GuidanceBackend(BYTES)


def start(backend, **params):
    return backend.compile(backend.translate(StructuredOutputsParams(**params)))


def allowed(backend, matcher):
    return ids(backend.masks([matcher])[0])


def ids(mask):
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def admits(backend, matcher, text):
    """Whether `text` is a whole output; every token must be in the mask too."""
    matcher = matcher.copy()
    for place, token in enumerate(data := text.encode(), 1):
        if token not in allowed(backend, matcher):
            return False
        if matcher.advance(token):
            return place == len(data) and matcher.read()[0].is_stopped()
    return EOS in allowed(backend, matcher)


CASES = [
    (
        {"json": PERSON},
        ['{"name":"x"}', '{"name": "é", "age": 3}', '{\n  "name": "x"\n}'],
        ['{"age":3}', "{}", "[]"],
    ),
    ({"json": PERSON}, ['{"name":"x","other":1}'], ['{"name":"x","age":-1}', '{          "name":"x"}']),
    ({"json": PERSON, "disable_additional_properties": True}, ['{"name":"x"}'], ['{"name":"x","other":1}']),
    (
        {"json": NESTED, "disable_additional_properties": True},
        ['{"at": {"x": 1}, "free": {"any": 1}, "open": {"z": 1}, "properties": {"x": 1}}'],
        [
            '{"at": {"x": 1, "y": 2}}',
            '{"at": {"x": 1}, "more": 1}',
            '{"at": {"x": 1}, "properties": {"z": 1}}',
        ],
    ),
    ({"json": BOTH, "disable_additional_properties": True}, ['{"x": 1, "y": 2}'], ['{"x": ""}']),
    ({"json": PERSON, "disable_any_whitespace": True}, ['{"name":"x"}'], ['{"name": "x"}']),
    ({"json": PERSON, "whitespace_pattern": "_"}, ['{_"name"_:_"x"_}'], ['{ "name":"x"}']),
    ({"json": True}, ["1", '"a"', "[true]"], ["x"]),
    ({"json_object": True}, ["{}", '{"a": [1, null]}'], ["[]", "1"]),
    ({"regex": r"\d{2,3}-[ab]+"}, ["12-a", "123-ba"], ["1-a", "12-", "12-c", "١٢-a"]),
    ({"regex": "^a|b$"}, ["a", "b"], ["c"]),
    ({"regex": "a/b"}, ["a/b"], ["a\\/b"]),
    ({"choice": ["yes", "yes, sir", 'q"\\\n']}, ["yes", "yes, sir", 'q"\\\n'], ["ye", "no"]),
    ({"grammar": 'root ::= "a" root | "b"'}, ["b", "aab"], ["a", "c"]),
    ({"grammar": 'start: item+\nitem: "x" | "(" item ")"'}, ["x", "((x))x"], ["(x"]),
    ({"structural_tag": TAG}, ["hi", 'hi <f=x>{"a": 1}</f> ok'], ["<f=y>", "<f=x>{1}"]),
]


def form(kind, **fields):
    """A format of a structural tag."""
    return {"type": kind, **fields}


def tag(begin, content, end):
    return form("tag", begin=begin, content=content, end=end)


INTEGER, ANY = form("json_schema", json_schema={"type": "integer"}), form("any_text")
F, G = tag("<f>", INTEGER, "</f>"), tag("<g>", form("regex", pattern="[a-z]/+"), ["</g>", "</>"])
TRIGGERED = form("triggered_tags", triggers=["<"], tags=[F, G])
THOUGHT = tag("<think>", ANY, "</think>")
FORMATS = [
    (form("const_string", value='say "x"\n'), ['say "x"\n'], ["say", "x"]),
    (F, ["<f>12</f>"], ["<f>a</f>", "12", "<f>12</f>."]),
    (G, ["<g>a//</g>", "<g>a/</>"], ["<g>a/</f>"]),
    (form("or", elements=[F, G]), ["<f>1</f>", "<g>a/</>"], ["<f>1</f><g>a/</>"]),
    (form("sequence", elements=[THOUGHT, F]), ["<think>a </f> <</think><f>1</f>"], ["<f>1</f>", "<think>"]),
    (form("sequence", elements=[ANY, F]), ["abc<f>1</f>", "<f>1</f>"], ["abc", "a<f>x</f>"]),
    (form("sequence", elements=[ANY, form("const_string", value="!"), INTEGER]), ["a!1", "!1"], ["a!", "1"]),
    (form("sequence", elements=[INTEGER, ANY]), ["1 and", "12"], ["and"]),
    (TRIGGERED, ["", "a", "<f>1</f>", "a <f>1</f> b <g>a/</> c"], ["<", "a <x", "<f>x"]),
    ({**TRIGGERED, "at_least_one": True}, ["<f>1</f>", "<f>1</f> b <g>a/</>"], ["", "a <f>1</f>"]),
    ({**TRIGGERED, "stop_after_first": True}, ["a", "a <f>1</f>"], ["<f>1</f> b"]),
    (
        {**TRIGGERED, "stop_after_first": True, "at_least_one": True},
        ["<f>1</f>", "<g>a/</>"],
        ["", "a", "<f>1</f><f>1</f>"],
    ),
    (tag("[", TRIGGERED, "]"), ["[]", "[a <f>1</f> b]"], ["[", "[a] b"]),
    (
        form("tags_with_separator", tags=[F, G], separator=", "),
        ["", "<f>1</f>", "<f>1</f>, <g>a/</>"],
        [", ", "<f>1</f> <f>1</f>"],
    ),
    (
        form("tags_with_separator", tags=[F], separator=",", at_least_one=True, stop_after_first=True),
        ["<f>1</f>"],
        ["", "<f>1</f>,<f>1</f>"],
    ),
    (
        form("sequence", elements=[form("optional", content=F), form("plus", content=G)]),
        ["<g>a/</>", "<f>1</f><g>a/</><g>a/</>"],
        ["<f>1</f>"],
    ),
    (
        form("sequence", elements=[form("star", content=F), form("const_string", value=".")]),
        [".", "<f>1</f>."],
        [],
    ),
]
CASES += [({"structural_tag": form("structural_tag", format=f)}, good, bad) for f, good, bad in FORMATS]
MALFORMED = [
    ({}, "formats are objects whose type is one of const_string"),
    (form("qwen_xml_parameter"), "not 'qwen_xml_parameter'"),
    (form("sequence", elements=[]), "a list that is not empty"),
    (form("sequence", elements=[ANY, INTEGER]), "any_text must come last"),
    (form("or", elements=[3]), "not None"),
    (tag("<f>", ANY, 3), "end must be a string"),
    (tag(None, ANY, "x"), "needs begin, a string"),
    (form("triggered_tags", triggers=["["], tags=[F]), "none of the triggers"),
    (form("triggered_tags", triggers=["["], tags=[3]), "none of the triggers"),
    (form("json_schema", json_schema=3), "json_schema, an object"),
    (form("regex", pattern="(["), "unclosed"),
]


@pytest.mark.parametrize(("params", "good", "bad"), CASES)
def test_what_is_admitted(backend, params, good, bad):
    matcher = start(backend, **params)
    assert [text for text in good if not admits(backend, matcher, text)] == []
    assert [text for text in bad if admits(backend, matcher, text)] == []


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"regex": "(["}, "unclosed character class"),
        ({"regex": "(?=a)a"}, "look-around"),
        ({"regex": r"(a)\1"}, "backreferences"),
        ({"regex": "a{0}"}, "no text but the empty one"),
        ({"grammar": "root ::= "}, "no text but the empty one"),
        ({"grammar": 'other ::= "a"'}, "No 'root' rule"),
        ({"grammar": "root ::= x"}, "'x' not found"),
        ({"grammar": "root ::= root"}, "Grammar error"),
        ({"json": {"type": "strin"}}, "Invalid type"),
        ({"json": {"not": {}}}, "Unimplemented keys"),
        ({"json": False}, "Unsatisfiable"),
        ({"json": {"$ref": "#"}}, "Grammar error"),
        ({"json": {"$ref": "https://example.com/x"}}, "not present"),
        ({"structural_tag": {"type": "structural_tag"}}, "structures"),
        ({"structural_tag": TAG | {"triggers": ["<b"]}}, "none of the triggers"),
        ({"structural_tag": TAG | {"structures": [3]}}, "objects with strings"),
        *(({"structural_tag": form("structural_tag", format=f)}, reason) for f, reason in MALFORMED),
    ],
)  # fmt: skip
def test_what_is_refused(backend, params, reason):
    with pytest.raises(RequestError, match=re.escape(reason)) as caught:
        start(backend, **params)
    assert caught.value.parameter == "structured_outputs"
    assert len(str(caught.value)) < 400 and "%llguidance" not in str(caught.value)


def test_the_end_is_known_at_once_where_nothing_may_follow(backend):
    matcher = start(backend, choice=["ab", "cd"])
    assert not matcher.advance(ord("a"))
    assert matcher.advance(ord("b"))


def test_the_end_stays_open_where_more_may_follow(backend):
    matcher = start(backend, regex="a+")
    assert not matcher.advance(ord("a"))
    assert allowed(backend, matcher) == {ord("a"), EOS}
    assert matcher.advance(EOS)


def test_copies_go_their_own_ways(backend):
    first = start(backend, choice=["ab", "cd"])
    second = first.copy()
    first.advance(ord("a"))
    assert allowed(backend, first) == {ord("b")}
    assert allowed(backend, second) == {ord("a"), ord("c")}


def test_outputs_that_are_open_at_once_share_no_lexer(backend):
    """But for a few; those that have ended count no longer."""
    first = start(backend, json=PERSON)
    rows = [first.copy() for _ in range(6 * guidance._PER_INSTANCE)]
    assert len({row._instance for row in rows}) == min(7, 2 * backend._num_threads)
    for token in b'{"name": "a':
        assert backend.advance(rows, [token] * len(rows)) == [False] * len(rows)
        assert not first.advance(token)
    assert len({id(mask) for mask in backend.masks([first, *rows])}) == 1
    del rows
    assert {start(backend, json=PERSON).copy()._instance, first._instance} == {0}


def test_many_advance_as_one_does(backend):
    """Ends, tokens that may not come, and texts that change between places, side by side."""
    rows = [start(backend, choice=["ab", "a"]), start(backend, choice=["ab"]), start(backend, json=PERSON)]
    steps = [b"aa{", b"bb" + b'"', b"xxn"]
    found = [backend.advance(rows, list(step)) for step in steps[:1]]
    assert found == [[False, False, False]]
    answers = backend.advance(rows, list(steps[1]))
    assert answers == [True, True, False]
    answers = backend.advance(rows, list(steps[2]))
    assert [isinstance(answer, RequestError) for answer in answers] == [True, True, False]
    assert ord("a") in allowed(backend, rows[2]) and ord("g") not in allowed(backend, rows[2])


def test_a_wrong_token_fails_its_matcher_alone(backend):
    good, bad = start(backend, choice=["ab"]), start(backend, choice=["ab"])
    with pytest.raises(RequestError):
        bad.advance(ord("x"))
    assert ids(backend.masks([bad, good])[1]) == {ord("a")}
    with pytest.raises(RequestError):
        bad.advance(ord("a"))


def test_a_grammar_that_forces_tokens_works_without_a_tokenizer(backend):
    matcher = start(backend, grammar='%llguidance {"no_forcing": false}\nstart: "abc" /[0-9]/')
    for token in b"abc":
        assert token in allowed(backend, matcher)
        matcher.advance(token)
    assert matcher.advance(ord("7"))
