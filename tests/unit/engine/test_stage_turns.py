"""Two stages: requests take turns, and their next steps are given out before the last ones were read."""

import dataclasses

import pytest

from octavo.engine.core import EngineCore
from tests.fakes import FakeExecutor, expected_output, fake_config, fake_request


def run(num_stages, requests, steps_in_flight=4, **options):
    """Return the executor behind a whole run, in which every output is as it should be."""
    config = fake_config(steps_in_flight=steps_in_flight, **options)
    parallel = dataclasses.replace(config.parallel, pipeline_parallel_size=num_stages)
    executor = FakeExecutor()
    core = EngineCore(dataclasses.replace(config, parallel=parallel), executor)
    core.start()
    for request in requests:
        core.add(request)
    tokens = {}
    while core.has_work():
        for output in core.step().outputs:
            tokens[output.request_id] = tokens.get(output.request_id, []) + output.new_token_ids
    for request in requests:
        assert tokens[request.request_id] == expected_output(request, 64)[0]
    return executor


def asked(count, max_tokens=12):
    return [fake_request(f"r{i}", [i % 4] * (3 + i % 5), max_tokens, seed=i) for i in range(count)]


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("steps_in_flight", [2, 4, 6])
@pytest.mark.parametrize("num_blocks", [26, 400])
def test_outputs_do_not_depend_on_stages(num_stages, steps_in_flight, num_blocks):
    run(num_stages, asked(9), steps_in_flight, num_blocks=num_blocks)


@pytest.mark.parametrize("num_stages", [2, 3])
def test_a_step_in_each_stage_has_other_requests(num_stages):
    steps = [set(step.request_ids) for step in run(num_stages, asked(6)).steps]
    busy = steps[num_stages + 1 : -num_stages]
    assert len(busy) > 6
    for first in range(len(busy) - num_stages + 1):
        together = busy[first : first + num_stages]
        assert sum(map(len, together)) == len(set().union(*together)) == 6, "a share for each stage"


def test_a_request_alone_goes_on_before_its_token_is_known():
    config = fake_config(steps_in_flight=4)
    parallel = dataclasses.replace(config.parallel, pipeline_parallel_size=2)
    executor = FakeExecutor()
    core = EngineCore(dataclasses.replace(config, parallel=parallel), executor)
    core.start()
    core.add(asked(1)[0])
    core.step()
    assert [step.num_scheduled_tokens for step in executor.steps] == [[3]]
    assert len(core._in_flight) == 3, "three more are under way"
