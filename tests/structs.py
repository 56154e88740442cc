"""Hypothesis strategies for msgspec structs, made from their types: `instances(kind)`."""

import types
import typing
from enum import Enum

import msgspec
from hypothesis import strategies as st

from octavo.messages.pooling import LATE_MODES, LateInteractionParams, PoolingParams
from octavo.messages.sampling import SamplingParams

INT64 = st.integers(-(2**63), 2**63 - 1)
FLOAT = st.floats(allow_nan=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)  # surrogates are not UTF-8
SCALARS = st.none() | st.booleans() | INT64 | FLOAT | TEXT | st.binary(max_size=8)
PLAIN = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
LEAVES = {
    bool: st.booleans(),
    int: INT64,
    float: FLOAT,
    str: TEXT,
    bytes: st.binary(max_size=8),
    type(None): st.none(),
}


def instances(kind):
    """Any value of a type that messages use."""
    if kind is SamplingParams:
        return sampling_params()
    if kind is PoolingParams:
        return st.builds(
            PoolingParams,
            dimensions=st.none() | st.integers(1, 99),
            step_tag_id=st.none() | st.integers(0, 99),
            late_interaction_params=st.none() | late_interaction_params(),
        )
    if kind is typing.Any:
        return PLAIN
    if kind in LEAVES:
        return LEAVES[kind]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return st.sampled_from(kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return st.builds(
            kind, **{field.name: instances(field.type) for field in msgspec.structs.fields(kind)}
        )
    if isinstance(kind, type) and issubclass(kind, tuple):
        return st.builds(kind, *map(instances, typing.get_type_hints(kind).values()))
    return generics(typing.get_origin(kind), typing.get_args(kind))


def late_interaction_params():
    """Queries and documents."""
    modes, keys = st.sampled_from(LATE_MODES), st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
    return st.builds(LateInteractionParams, modes, keys, st.none() | st.integers(1, 99))


def generics(origin, arguments):
    """Lists, tuples, dicts and unions."""
    if origin is list:
        return st.lists(instances(arguments[0]), max_size=3)
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(instances(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(instances, arguments))
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin is dict:
        return st.dictionaries(instances(arguments[0]), instances(arguments[1]), max_size=3)
    assert origin in (typing.Union, types.UnionType), (origin, arguments)
    return st.one_of(*map(instances, arguments))


def sampling_params():
    """Valid parameters: this struct has rules of its own."""
    return st.builds(
        SamplingParams,
        n=st.integers(1, 4),
        temperature=st.floats(0.1, 2),
        top_p=st.floats(0.01, 1),
        top_k=st.integers(-1, 100),
        seed=st.none() | INT64,
        stop=st.lists(TEXT.filter(bool), max_size=2),
        stop_token_ids=st.none() | st.lists(st.integers(0, 2**40), max_size=3),
        max_tokens=st.none() | st.integers(10, 99),
        min_tokens=st.integers(0, 9),
        logit_bias=st.none() | st.dictionaries(st.integers(0, 2**40), st.floats(-100, 100), max_size=3),
        bad_words=st.none() | st.lists(TEXT.filter(bool), max_size=2),
        extra_args=st.none() | st.dictionaries(TEXT, PLAIN, max_size=2),
    )
