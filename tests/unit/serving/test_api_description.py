"""/openapi.json says what bodies may hold, as they are read."""

import re
from pathlib import Path

import pytest

import octavo
import octavo.base.foreign
import octavo.serving
from octavo.frontend.requests.response_format import FIELDS
from octavo.messages.sampling import SamplingParams
from octavo.serving.openai.protocol import ChatRequest, CompletionRequest
from octavo.serving.openapi import describe_api
from octavo.serving.registry import Route, load_routes

IGNORED = {name: field.text for name, field in octavo.base.foreign.FIELDS.items() if not field.is_refused}
LATER = {name: field.text for name, field in octavo.base.foreign.FIELDS.items() if field.is_refused}


@pytest.fixture(scope="module")
def description():
    return describe_api(strict=True)


def references(node):
    if isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"]
        node = list(node.values())
    if isinstance(node, list):
        for entry in node:
            yield from references(entry)


def test_every_documented_route_is_there(description):
    routes = [route for route in load_routes() if isinstance(route, Route) and route.documented]
    for route in routes:
        path = route.path.replace(":path", "")
        for method in route.methods:
            operation = description["paths"][path][method.lower()]
            assert operation["description"]
            assert ("requestBody" in operation) == (route.request_model is not None)


def test_references_lead_somewhere(description):
    names = set(references(description))
    assert names
    for name in names:
        assert name.removeprefix("#/components/schemas/") in description["components"]["schemas"]


def test_bodies_have_all_their_fields(description):
    schema = description["components"]["schemas"]["ChatRequest"]
    assert schema["required"] == ["messages"]
    assert set(schema["properties"]) == {*ChatRequest.__struct_fields__, *IGNORED}
    assert schema["additionalProperties"] is False
    assert schema["properties"]["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 2}


def test_a_field_has_one_fate():
    known = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
    assert not known & IGNORED.keys() and not known & LATER.keys() and not IGNORED.keys() & LATER.keys()


def test_every_field_is_used():
    """A field that nobody reads would be accepted without an effect."""
    sources = "".join(
        path.read_text()
        for path in Path(octavo.serving.__file__).parent.rglob("*.py")
        if path.name != "protocol.py"
    )
    for name in {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__} - set(FIELDS):
        assert name in SamplingParams.__struct_fields__ or re.search(rf"\b{name}\b", sources), name


@pytest.mark.parametrize("table", [IGNORED, LATER])
def test_the_page_lists_the_fields(table):
    page = (Path(octavo.__file__).parents[1] / "docs" / "server.md").read_text()
    assert "\n".join(f"| `{name}` | {why} |" for name, why in table.items()) in page
