"""Texts of one residue go on in the same ways, and outputs that have one ask the library once."""

import json

import numpy as np
import pytest

from octavo.engine.structured.guidance import GuidanceBackend
from octavo.engine.structured.lark import WHITE_SPACE
from octavo.engine.structured.residues import Residues, most_blanks, most_items
from octavo.messages.structured import StructuredOutputsParams
from tests.structured import BYTES, ORDER

NAME = {"type": "string", "minLength": 2}
LINES = {"x-guidance": {"whitespace_pattern": WHITE_SPACE}}
SCHEMA = LINES | {
    "type": "object",
    "$defs": {"point": {"type": "object", "properties": {"x": {"type": "integer"}, "é": NAME}}},
    "properties": {
        "id": {"type": "integer", "minimum": 15, "maximum": 1234},
        "note": {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}]},
        "at": {"$ref": "#/$defs/point"},
        "tags": {"type": "array", "items": NAME, "minItems": 2, "maxItems": 9},
        "either": {"anyOf": [{"type": "object", "properties": {"a": NAME}}, NAME]},
        "when": {"type": "string", "format": "date"},
        "\\": {"type": "string", "format": "date"},
    },
    "additionalProperties": NAME,
}
ALIKE = [
    ('{"id":20,"note":"ab', '{\n "id": 999, "note": "x\\n'),
    ('{"id":20,"note":"aé', '{"id":20,"note":"\\u0001日'),
    ('{"id":20', '{"id":21'),
    ('{"id":124', '{"id":999'),
    ('{"at":{"x":-5', '{"at":{"x":-617'),
    ('{"at":{"x":1,"é":"ab', '{"at":{"x":22,"é":"abcdef'),
    ('{"at":{"x":1},"tags":["ab","', '{"at":{"x":0,"é":"ab"},"tags":["abcde","'),
    ('{"either":"ab","w', '{"either":"cde","w'),
    (b'{"note":"\xc3', b'{"note":"\xe3\x81'),
    ('{"id":20,\n  ', '{"id":999,\r\n\t\t\t\t'),
    ('{"id":20,  ', '{"id":999, \t'),
]
UNLIKE = [
    ('{"id":20,"note":"ab', '{"id":20,"note":"abc'),
    ('{"id":20,"note":"ab', '{"id":20,"note":"a\\'),
    ('{"id":2', '{"id":1'),
    ('{"id":12', '{"id":13'),
    ('{"id":123', '{"id":124'),
    ('{"at":{"x":0', '{"at":{"x":5'),
    ('{"at":{"é":"a', '{"at":{"é":"ab'),
    ('{"tags":["ab"', '{"tags":["ab","cd"'),
    ('{"tags":["ab","cd"', '{"tags":["ab","cd"' + 7 * ',"ef"'),
    ('{"note":"a","', '{"id":20,"'),
    ('{"when":"2020', '{"when":"2021'),
    (r'{"\\":"2020', r'{"\\":"2021'),
    (r'{"wh\u0065n":"2020', r'{"wh\u0065n":"2021'),
    (b'{"note":"\xc3', b'{"note":"\xe3'),
    ('{"id":20', '{"id":20 '),
    ('{"id":20,  ', '{"id":20, '),
    ('{"id":20,\n', '{"id":20,\r'),
    ('{"id":20,\n' + " " * 29, '{"id":20,\n' + " " * 30),
]


@pytest.fixture(scope="module")
def backend():
    return GuidanceBackend(BYTES)


def residue(text, schema=SCHEMA, reach=2):
    residues, data = Residues(schema, reach, 100), text if isinstance(text, bytes) else text.encode()
    found = residues.begin(), (0,)
    for place in range(len(data)):
        found = found and residues.after(*found, data[place : place + 1])
    at_once = residues.after(residues.begin(), (0,), data)
    assert (found and found[0]) == (at_once and at_once[0]), "byte by byte as at once"
    return found and found[0]


@pytest.mark.parametrize(("first", "second"), ALIKE)
def test_what_goes_on_in_the_same_ways_is_one(first, second):
    residues = Residues(SCHEMA, 2, 100)
    texts = [text if isinstance(text, bytes) else text.encode() for text in (first, second)]
    found = [residues.after(residues.begin(), (0,), text) for text in texts]
    assert None not in found and found[0][0] == found[1][0]


@pytest.mark.parametrize(("first", "second"), UNLIKE)
def test_what_goes_on_differently_is_not(first, second):
    assert residue(first) is not None and residue(first) != residue(second)


@pytest.mark.parametrize(
    "text", ['{"either":{', '{"id":20}', '{"note":{', '{"' + "x" * 2000, '{"at":{"x":1' + ',"y":2' * 1000]
)
def test_what_is_given_up(text):
    """Containers that are judged in several ways, the end, and what is long."""
    assert residue(text[:3] if text[:3] == '{"n' else text[:2]) is not None
    assert residue(text) is None


@pytest.mark.parametrize(
    "keyword", [{"uniqueItems": True}, {"contains": {"const": 1}}, {"prefixItems": [{}]}]
)
def test_schemas_that_say_more_are_given_up(keyword):
    assert Residues({"type": "array", "items": ORDER}, 2, 100).begin() is not None
    assert Residues({"type": "array", "items": ORDER} | keyword, 2, 100).begin() is None


def test_limits_count_as_far_as_a_token_reaches():
    """Within reach of its end an array is like no other; counts that change are new objects."""
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 20, "maxItems": 40}
    found = [residue("[" + "true," * count, schema, reach=3) for count in range(1, 40)]
    same = [found.index(one) + 1 for one in found]
    assert same == [1] * 17 + [18, 19] + [20] * 18 + [38, 39]
    residues = Residues(schema, 3, 100)
    inside, counts = residues.after(residues.begin(), (0,), b"[true,")
    assert residues.after(inside, counts, b"fal")[1] is counts
    assert residues.after(inside, counts, b"false,")[1] == (0, 2)
    assert most_items([b"a", b',"b", 2,', b", ,"]) == 4
    assert most_blanks([b"a", b" \t b ", b"\n  "]) == 3


def test_equal_residues_are_asked_about_once(backend, monkeypatch):
    """From the second output on; the masks of all are those of one that stands alone."""
    first = backend.compile(
        backend.translate(StructuredOutputsParams(json={"type": "array", "items": ORDER}))
    )
    asked, ask = [], GuidanceBackend._ask
    monkeypatch.setattr(GuidanceBackend, "_ask", lambda self, new: asked.append(len(new)) or ask(self, new))
    texts = [
        json.dumps([ORDER_TEXT | {"id": 10 + i, "note": f"note {i}"}] * 3)[:-1].encode() for i in range(10)
    ]
    alone, *rows = [first.copy() for _ in texts]
    for place in range(len(texts[0])):
        mask = backend.masks([alone])[0]
        assert all(np.array_equal(mask, other) for other in backend.masks(rows))
        assert not alone.advance(texts[0][place])
        assert backend.advance(rows, [text[place] for text in texts[1:]]) == [False] * len(rows)
    assert sum(asked) < 2 * len(texts[0])


ORDER_TEXT = {"id": 1, "status": "paid", "gift": True, "note": "", "tags": ["a", "b"]}
