"""Lists of texts in the worker: taken apart for a step, their results put together again."""

import msgspec
import numpy as np

from octavo.messages.pooling import Pooled, PoolingParams
from octavo.messages.request import RequestSpec, Text
from octavo.messages.step import ModelRunnerOutput, NewRequest, SchedulerOutput
from octavo.runtime.worker.text_lists import put_together, take_apart

SPEC = RequestSpec(PoolingParams(task="classify"), 0)


def step_of(*requests):
    names, lengths = [r.request_id for r in requests], [len(r.token_ids) for r in requests]
    return SchedulerOutput(1, list(requests), [], names, [0] * len(names), lengths, {}, [])


def pooled(*numbers):
    return Pooled(np.array(numbers, np.float32).tobytes(), [len(numbers)])


def test_each_text_is_a_request_of_the_step():
    texts = [Text(2, pair_start=1), Text(1, num_instruction_tokens=1), Text(3)]
    one = NewRequest("one", [9], 1, SPEC)
    step, names = take_apart(step_of(NewRequest("list", [1, 2, 3, 4, 5, 6], 6, SPEC, texts), one))
    assert step.request_ids == ["one", *names["list"]] and len(set(step.request_ids)) == 4
    assert step.num_scheduled_tokens == [1, 2, 1, 3] and step.num_computed_tokens == [0] * 4
    assert [r.token_ids for r in step.new_requests] == [[1, 2], [3], [4, 5, 6], [9]]
    first, second = (msgspec.structs.replace(SPEC, **wanted) for wanted in (
        {"pair_start": 1}, {"num_instruction_tokens": 1},
    ))  # fmt: skip
    assert [r.spec for r in step.new_requests] == [first, second, SPEC, SPEC]


def test_a_step_without_lists_stays_as_it_is():
    step = step_of(NewRequest("one", [9], 1, SPEC))
    assert take_apart(step) == (step, {})


def test_results_are_put_together():
    texts = [Text(1), Text(1)]
    step = step_of(NewRequest("list", [1, 2], 2, SPEC, texts), NewRequest("one", [9], 1, SPEC))
    _, names = take_apart(step)
    first, second = names["list"]
    result = ModelRunnerOutput(
        1,
        [[], [], []],
        pooled={first: pooled(1.0, 2.0), second: pooled(np.nan, 0.0), "one": pooled(5.0)},
        errors={second: "not finite"},
    )
    put_together(result, step.request_ids, names)
    assert result.sampled_token_ids == [[], []] and not result.errors
    assert result.pooled["one"] == pooled(5.0)
    found = result.pooled["list"]
    assert found.shape == [2, 2] and found.errors == {1: "not finite"}
    assert found.of_text(0) == pooled(1.0, 2.0) and found.of_text(1) is None


def test_results_of_later_texts_follow():
    one, two = Pooled(b"aabb", [2, 1], {0: "no"}), Pooled(b"cc", [1, 1], {0: "nor this"})
    both = one + two
    assert both == Pooled(b"aabbcc", [3, 1], {0: "no", 2: "nor this"})
    assert both.of_text(1) == Pooled(b"bb", [1])
