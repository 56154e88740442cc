"""Requests made from /openapi.json, right and wrong ones: none leads to an error of the server's own.

OCTAVO_FUZZ_EXAMPLES=20 makes as many of each kind for each route.
"""

import os
from contextlib import suppress

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from tests.served_process import ServeProcess

EXAMPLES = settings(
    max_examples=int(os.environ.get("OCTAVO_FUZZ_EXAMPLES", "2")),
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def server():
    with ServeProcess("--max-model-len", "64") as server:
        yield server


@pytest.mark.matrix
@pytest.mark.parametrize(
    "mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=lambda mode: mode.name
)
def test_no_request_is_the_servers_fault(server, mode):
    schema = schemathesis.openapi.from_url(server.url + "/openapi.json")
    num_operations = 0
    for result in schema.get_all_operations():
        operation = result.ok()
        num_operations += 1

        @EXAMPLES
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case):
            answer = case.call(timeout=10)
            assert answer.status_code < 500, (case.as_curl_command(), answer.text)
            if answer.status_code >= 400 and case.method != "HEAD":
                error = answer.json()["error"]
                is_ollamas = case.path.startswith("/api/") and isinstance(error, str)
                assert is_ollamas or {"message", "type"} <= set(error)

        with suppress(Unsatisfiable):  # nothing can be wrong where nothing is asked
            check()
    assert num_operations > 20
    assert "Traceback" not in server.log
