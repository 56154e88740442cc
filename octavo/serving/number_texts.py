"""Numbers that clients send as text, "temperature": "0.7", or as 5.0 for 5. Called by `body`.

As in pydantic's lax mode, which vLLM's clients are used to.
"""

import math
from functools import cache
from typing import Any

import msgspec
from msgspec.inspect import FloatType, IntType, Metadata, NoneType, StructType, Type, UnionType, type_info

from octavo.base.errors import RequestError


def with_numbers(fields: dict[str, Any], model: type[msgspec.Struct]) -> dict[str, Any]:
    """The fields, where those that the model has as numbers are no texts. Raises RequestError."""
    told = {name: value for name, value in fields.items() if isinstance(value, str | float)}
    read = {name: _number(name, told[name]) for name in told.keys() & _numeric(model)}
    return fields | read if read else fields


def _number(name: str, told: str | float) -> float:
    """What is told, as an int if it is whole."""
    for read in (int, float):
        try:
            number = read(told)
        except ValueError:
            continue
        if math.isfinite(number) and (isinstance(told, str) or number == told):
            return number
    raise RequestError(f"{name}: Expected a number, got the text {str(told)[:20]!r}.", name)


@cache
def _numeric(model: type[msgspec.Struct]) -> frozenset[str]:
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
