"""Numbers that clients send as text: "temperature": "0.7". Called by `body`; as in pydantic's lax mode."""

import math
from functools import cache
from typing import Any

import msgspec
from msgspec.inspect import FloatType, IntType, Metadata, NoneType, StructType, Type, UnionType, type_info

from octavo.base.errors import RequestError


def with_numbers(fields: dict[str, Any], model: type[msgspec.Struct]) -> dict[str, Any]:
    """The fields, where those that the model has as numbers are no texts. Raises RequestError."""
    texts = {
        name: value for name, value in fields.items() if isinstance(value, str) and name in _numeric(model)
    }
    return fields | {name: _number(name, text) for name, text in texts.items()} if texts else fields


def _number(name: str, text: str) -> float:
    for read in (int, float):
        try:
            number = read(text)
        except ValueError:
            continue
        if math.isfinite(number):
            return number
    raise RequestError(f"{name}: Expected a number, got the text {text[:20]!r}.", name)


@cache
def _numeric(model: type[msgspec.Struct]) -> frozenset[str]:
    """Names of the fields that are numbers or null, and nothing else."""
    info = type_info(model)
    assert isinstance(info, StructType)
    return frozenset(field.encode_name for field in info.fields if _kinds(field.type) in _NUMBERS)


_NUMBERS = [{IntType}, {FloatType}, {IntType, FloatType}]


def _kinds(kind: Type) -> set[type[Type]]:
    if isinstance(kind, Metadata):
        return _kinds(kind.type)
    if isinstance(kind, UnionType):
        return set().union(*map(_kinds, kind.types))
    return {type(kind)} - {NoneType}
