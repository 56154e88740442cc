"""Outputs of one grammar that share states have the library's masks, whatever they have written.

SHARED_STATES is the number of grammars: some by default, thousands by hand.
"""

import contextlib
import os

import llguidance
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance.numpy import fill_next_token_bitmask

from octavo.base.errors import RequestError
from octavo.engine.structured import residues
from octavo.engine.structured.guidance import GuidanceBackend
from octavo.messages.structured import StructuredOutputsParams, Vocabulary
from tests.structured import BYTES, SCHEMAS

NUM_GRAMMARS = int(os.environ.get("SHARED_STATES", "60"))
NUM_OUTPUTS, NUM_STEPS = 6, 40
PIECES = [
    '", "',
    '": ',
    '"},{"',
    "}]",
    "tr",
    "12",
    "ab",
    "  ",
    "\n  ",
    "\\u00",
    "é",
    'a "',
    ',"',
    "[1,",
    " b",
    "-0",
]
VOCABULARY = Vocabulary(BYTES.tokens + [piece.encode() for piece in PIECES], BYTES.special_ids, BYTES.end_ids)
FORMS = [
    {"json": {"anyOf": [{"type": "null"}, {"type": "object", "properties": {}}]}},
    {"regex": "[a-z]{2,5}( [a-z]+)*"},
    {"regex": "(foo|foobar|fo+)(x|y)*z?"},
    {"regex": "(ab|a)(bc|c)?d{0,3}"},
    {"regex": "[^,]{1,8}(,[^,]{1,8}){0,4}"},
    {"choice": ["yes", "yesterday", "no", "né", "y e s"]},
    {"grammar": 'start: term (("+"|"-") term)*\nterm: NUM | "(" start ")"\nNUM: /[0-9]+/'},
    {"grammar": 'start: (WORD " ")+ ("."|"!")\nWORD: /[a-z]+/'},
]
SEEDS = st.integers(0, 2**32 - 1)


def ids(mask):
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def differing(backend, form, seed):
    """Return the tokens of the first output that has another mask than the library's; None: there is none."""
    grammar = backend.translate(StructuredOutputsParams(**form))
    first, rng = backend.compile(grammar), np.random.default_rng(seed)
    outputs = [
        (first.copy(), llguidance.LLMatcher(backend._tokenizer, grammar, log_level=0))
        for _ in range(NUM_OUTPUTS)
    ]
    expected = np.empty((1, backend._num_words), np.int32)
    for _ in range(NUM_STEPS):
        chosen = []
        for mask, (output, matcher) in zip(backend.masks([o for o, _ in outputs]), outputs, strict=True):
            fill_next_token_bitmask(matcher, expected)
            allowed = ids(expected)
            if not np.array_equal(ids(mask), allowed):
                return list(output.tokens)
            chosen.append(int(rng.choice(allowed)))
        ends = backend.advance([output for output, _ in outputs], chosen)
        for (_, matcher), token_id, end in zip(outputs, chosen, ends, strict=True):
            assert matcher.consume_token(token_id) and end == matcher.is_stopped()
        outputs = [pair for pair, end in zip(outputs, ends, strict=True) if not end]
        if not outputs:
            return None
    return None


@pytest.mark.timeout(max(300, 2 * NUM_GRAMMARS))
def test_masks_are_the_librarys():
    backend = GuidanceBackend(VOCABULARY)

    @settings(max_examples=NUM_GRAMMARS, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(FORMS) | SCHEMAS.map(lambda schema: {"json": schema}), SEEDS)
    def check(form, seed):
        with contextlib.suppress(RequestError):  # what the library refuses
            assert differing(backend, form, seed) is None

    check()


def test_lengths_that_are_not_counted_are_noticed(monkeypatch):
    """The negative twin."""
    form = {"json": {"type": "array", "items": {"type": "string", "maxLength": 3}}}
    assert all(differing(GuidanceBackend(VOCABULARY), form, seed) is None for seed in range(3))
    shorten = residues.Residues._shorten
    monkeypatch.setattr(residues.Residues, "_shorten", lambda *args: shorten(*args).replace(b"..", b"."))
    assert any(differing(GuidanceBackend(VOCABULARY), form, seed) is not None for seed in range(3))
