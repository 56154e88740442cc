"""Random schemas: what an engine that samples any allowed token ends with `stop` parses and validates.

STRUCTURED_SCHEMAS is their number: a few by default, thousands by hand.
"""

import json
import os
import tempfile
from pathlib import Path

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.base.errors import RequestError
from octavo.engine.structured.guidance import GuidanceBackend
from octavo.messages.request import FinishReason
from octavo.messages.structured import StructuredOutputsParams
from tests.structured import BYTES, SCHEMAS, ByteEngine, text

NUM_SCHEMAS = int(os.environ.get("STRUCTURED_SCHEMAS", "40"))
CONDITIONS = [{}, {"steps_in_flight": 2}, {"max_num_batched_tokens": 3}, {"num_blocks": 202}]


def validator(schema):
    kind = jsonschema.Draft202012Validator
    return kind(schema, format_checker=kind.FORMAT_CHECKER)


def check_outputs(schema, options):
    """Several requests at once under one schema; the number that came to their end."""
    with tempfile.TemporaryDirectory() as folder:
        engine = ByteEngine(Path(folder), max_model_len=800, **options)
        ends = engine.run(engine.request(str(seed), 600, seed, json=schema) for seed in range(3))
    assert len(ends) == 3
    num_stopped = 0
    for tokens, last in ends.values():
        assert last.finish_reason in (FinishReason.STOP, FinishReason.LENGTH), last.error
        if last.finish_reason is FinishReason.STOP:
            num_stopped += 1
            validator(schema).validate(json.loads(text(tokens)))
    return num_stopped


def is_supported(backend, schema):
    """What the library refuses (two properties that no text can tell apart, …) proves nothing."""
    try:
        backend.compile(GuidanceBackend.translate(StructuredOutputsParams(json=schema)))
    except RequestError:
        return False
    return True


@pytest.mark.timeout(max(300, 2 * NUM_SCHEMAS))
def test_what_stops_is_valid():
    counts = {"schemas": 0, "refused": 0, "stopped": 0}
    backend = GuidanceBackend(BYTES)

    @settings(max_examples=NUM_SCHEMAS, deadline=None, suppress_health_check=list(HealthCheck))
    @given(SCHEMAS, st.sampled_from(CONDITIONS))
    def run(schema, options):
        if is_supported(backend, schema):
            counts["schemas"] += 1
            counts["stopped"] += check_outputs(schema, options)
        else:
            counts["refused"] += 1

    run()
    print(counts)
    assert counts["stopped"] > counts["schemas"]  # of three each
    assert counts["refused"] < counts["schemas"] / 5
