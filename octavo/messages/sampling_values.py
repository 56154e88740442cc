"""Readers of single values of `SamplingParams`: what a user gave, returned in its proper type.

Used by the messages only. Every one raises RequestError, whose text says the name, what is allowed and what
was given; texts follow vLLM's.
"""

import math
from collections.abc import Mapping, Set
from numbers import Integral, Real
from typing import Any

from octavo.base.errors import RequestError, wrong

_MAX_INTEGER = 2**63 - 1  # what a message can carry


def number(value: object, name: str) -> float:
    """A finite float."""
    if type(value) is float and math.isfinite(value):
        return value  # as usual; to ask an abstract class takes ten times as long
    try:
        result = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    except OverflowError:
        result = math.inf
    if not math.isfinite(result):
        raise wrong(name, f"must be a finite number, got {value!r}")
    return result


def within(value: object, name: str, low: float, high: float) -> float:
    """A float in [low, high]."""
    result = number(value, name)
    if not low <= result <= high:
        raise wrong(name, f"must be in [{low:g}, {high:g}], got {result}")
    return result


def integer(value: object, name: str, low: int, allowed: str) -> int:
    """An int of at least `low` ("must be `allowed`") that a message can carry."""
    if type(value) is int and low <= value <= _MAX_INTEGER:
        return value
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise wrong(name, f"must be an integer, got {value!r}")
    result = int(value)
    if result < low:
        raise wrong(name, f"must be {allowed}, got {result}")
    if result > _MAX_INTEGER:
        raise wrong(name, f"must be less than 2**63, got {result}")
    return result


def number_of_logprobs(value: object, name: str) -> int | None:
    """A count, -1 for all, or None; True is 1."""
    if value is None or value is False:
        return None
    return 1 if value is True else integer(value, name, -1, "non-negative or -1")


def texts(values: object, name: str) -> list[str]:
    """Strings that UTF-8 can hold."""
    if not isinstance(values, list | tuple) or not all(isinstance(text, str) for text in values):
        raise wrong(name, f"must be a list of strings, got {values!r}")
    if any("\ud800" <= character <= "\udfff" for text in values for character in text):
        raise wrong(name, f"holds half of a surrogate pair, which is no text: {values!r}")
    return list(values)


def strings(value: object, name: str) -> list[str]:
    """One string, or several, none of them empty."""
    result = texts([value] if isinstance(value, str) else value, name)
    if "" in result:
        raise wrong(name, "cannot contain an empty string")
    return result


def functions(value: object, name: str) -> list[Any]:
    """A list of callables."""
    if not isinstance(value, list | tuple) or not all(callable(function) for function in value):
        raise wrong(name, f"must be a list of functions, got {value!r}")
    return list(value)


def token_ids(values: object, name: str, unique: bool = True) -> list[int]:
    """In their order; each once if `unique`."""
    if not isinstance(values, list | tuple | range | Set):
        raise wrong(name, f"must be a list of token ids, got {values!r}")
    if set(map(type, values)) == {int} and min(values) >= 0 and max(values) <= _MAX_INTEGER:
        ids = list(values)  # in a tenth of the time that asking one by one takes
    elif any(isinstance(value, bool) or not isinstance(value, Integral) for value in values):
        raise wrong(name, f"must contain only integers, got {values!r}")
    else:
        ids = [integer(value, name, 0, "ids of at least 0") for value in values]
    return list(dict.fromkeys(ids)) if unique else ids


def biases(values: object) -> dict[int, float]:
    """Keys as integers, values clamped to what is allowed."""
    if not isinstance(values, Mapping):
        raise wrong("logit_bias", f"must map token ids to numbers, got {values!r}")
    result, invalid = {}, []
    for key, value in values.items():
        try:
            token_id = int(key)
        except (TypeError, ValueError, OverflowError):
            invalid.append(key)
            continue
        integer(token_id, "logit_bias", 0, "about token ids of at least 0")
        result[token_id] = min(100.0, max(-100.0, number(value, "logit_bias")))
    if invalid:
        text = f"logit_bias contains key(s) that cannot be converted to integer token IDs: {invalid!r}"
        raise RequestError(text, "logit_bias")
    return result
