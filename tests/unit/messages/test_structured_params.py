"""StructuredOutputsParams: one kind, readable, bounded; and its older names."""

import msgspec
import pytest
from pydantic import BaseModel

from octavo import GuidedDecodingParams, RequestError, SamplingParams, StructuredOutputsParams


class Person(BaseModel):
    name: str


def nested(levels):
    schema = {}
    for _ in range(levels - 1):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({}, "must use one kind of structured outputs constraint but none"),
        ({"json_object": False}, "but none"),
        ({"json": {}, "regex": "a"}, "only use one kind .* multiple are specified: json, regex"),
        ({"json": "{broken"}, "json is not valid JSON"),
        ({"json": '{"a": NaN}'}, "json is not valid JSON"),
        ({"json": {"a": float("inf")}}, "json is not valid JSON"),
        ({"json": {"a": object()}}, "json is not valid JSON"),
        ({"json": "[1]"}, "must be a JSON object, got list"),
        ({"json": 3}, "must be a JSON object, got int"),
        ({"json": nested(65)}, "more than 64 levels"),
        ({"json": "[" * 100_000}, "more than 64 levels"),
        ({"json": {"enum": ["x" * 2**20]}}, "at most 1048576 characters"),
        ({"json": {"const": "\ud800"}}, "surrogate"),
        ({"regex": ""}, "regex cannot be an empty string"),
        ({"regex": 3}, "regex must be a string, got int"),
        ({"regex": "a" * (2**20 + 1)}, "at most"),
        ({"grammar": " \n"}, "grammar cannot be an empty string"),
        ({"choice": []}, "choice cannot be an empty list"),
        ({"choice": ["a", ""]}, "choice cannot contain an empty string"),
        ({"choice": "ab"}, "choice must be a list of strings"),
        ({"choice": ["a", 1]}, "choice must be a list of strings"),
        ({"choice": ["\udfff"]}, "surrogate"),
        ({"json_object": "yes"}, "json_object must be True or False"),
        ({"structural_tag": "[]"}, "structural_tag must be a JSON object"),
        ({"regex": "a", "backend": "none-such"}, "backend must be one of auto"),
        ({"regex": "a", "disable_any_whitespace": 1}, "disable_any_whitespace must be True or False"),
    ],
)
def test_refused(values, text):
    with pytest.raises(RequestError, match=text) as caught:
        StructuredOutputsParams(**values)
    assert caught.value.parameter == "structured_outputs"


def test_read():
    assert StructuredOutputsParams(json='{"type": "object"}').json == {"type": "object"}
    assert StructuredOutputsParams(json=Person).json["required"] == ["name"]
    assert StructuredOutputsParams(json=nested(64)).kind == "json"
    assert StructuredOutputsParams(choice=("a", "b", "a")).choice == ["a", "b"]
    assert StructuredOutputsParams(json_object=True, backend="xgrammar").kind == "json_object"


@pytest.mark.parametrize(
    "alias",
    [
        {"structured_outputs": {"regex": "a+"}},
        {"guided_decoding": GuidedDecodingParams(regex="a+")},
        {"guided_regex": "a+", "guided_json": None},
    ],
)
def test_older_names(alias):
    assert SamplingParams(**alias).structured_outputs == StructuredOutputsParams(regex="a+")


@pytest.mark.parametrize(
    "values",
    [
        {"structured_outputs": {"regexp": "a"}},
        {"structured_outputs": "a"},
        {"guided_regex": "a", "guided_choice": ["a"]},
        {"guided_regex": "a", "structured_outputs": StructuredOutputsParams(regex="a")},
        {"guided_decoding": 3},
    ],
)
def test_older_names_refused(values):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**values)
    assert caught.value.parameter == "structured_outputs"


def test_it_survives_a_message():
    params = SamplingParams(guided_json={"type": "object", "properties": {"a": {"type": "null"}}})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    assert params.clone() == params
