"""Every way in which a request over HTTP names a form, and what contradicts itself."""

import pytest

from octavo.base.errors import RequestError
from octavo.frontend.requests.response_format import structured_outputs_of
from octavo.messages.structured import StructuredOutputsParams

SCHEMA = {"type": "object"}
CLOSED = {"json": SCHEMA, "disable_additional_properties": True}
NAMED = {"name": "x", "schema": SCHEMA, "strict": True}


@pytest.mark.parametrize(
    ("request_fields", "expected"),
    [
        ({}, None),
        ({"response_format": None, "guided_json": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"guided_decoding_backend": "xgrammar"}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, CLOSED),
        (
            {"response_format": {"type": "structural_tag", "structures": [], "triggers": []}},
            {"structural_tag": {"type": "structural_tag", "structures": [], "triggers": []}},
        ),
        ({"structured_outputs": {"choice": ["a"]}}, {"choice": ["a"]}),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, {"json": SCHEMA}),
        (
            {"guided_json": SCHEMA, "guided_whitespace_pattern": " "},
            {"json": SCHEMA, "whitespace_pattern": " "},
        ),
        ({"guided_regex": "a", "guided_decoding_backend": "outlines"}, {"regex": "a", "backend": "outlines"}),
        (
            {
                "response_format": {"type": "json_object"},
                "structured_outputs": {"disable_any_whitespace": True},
            },
            {"json_object": True, "disable_any_whitespace": True},
        ),
    ],
)
def test_read(request_fields, expected):
    wanted = None if expected is None else StructuredOutputsParams(**expected)
    assert structured_outputs_of(request_fields) == wanted


@pytest.mark.parametrize(
    "request_fields",
    [
        {"response_format": "json"},
        {"response_format": {}},
        {"response_format": {"type": "xml"}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        {"response_format": {"type": "json_object"}, "guided_json": {}},
        {"guided_json": {}, "guided_regex": "a"},
        {"structured_outputs": {}},
        {"structured_outputs": []},
        {"structured_outputs": {"regexp": "a"}},
        {"guided_regex": ""},
    ],
)
def test_refused(request_fields):
    with pytest.raises(RequestError) as caught:
        structured_outputs_of(request_fields)
    assert caught.value.parameter in ("response_format", "structured_outputs")
