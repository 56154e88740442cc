"""Lists of texts in the scheduler: one request, of which each step takes as many texts as fit."""

import pytest

from octavo.base.errors import PromptTooLong
from octavo.engine.scheduler.scheduler import Scheduler
from octavo.messages.kv import CachePlan
from octavo.messages.pooling import Pooled, PoolingParams
from octavo.messages.request import FinishReason, RequestSpec, Text
from octavo.messages.step import ModelRunnerOutput
from tests.fakes import fake_config, fake_request


class Driver:
    """The scheduler of an encoder, without a cache; the result of a text is its first token."""

    def __init__(self, **options):
        options = {"max_num_seqs": 4, "max_num_batched_tokens": 10, "enable_chunked_prefill": False} | options
        plan = CachePlan([], 1, 4, max_model_len=10, num_result_tokens=1)
        self.scheduler = Scheduler(fake_config(**options).scheduler, plan, plan.max_total_tokens, False)
        self.steps = []

    def add(self, request_id, *lengths, **fields):
        """A list of texts of so many tokens; of one, a single text."""
        texts = [Text(length) for length in lengths] if len(lengths) > 1 else []
        fields.setdefault("arrival_s", float(self.scheduler.num_open))
        ids = [place for place, length in enumerate(lengths) for _ in range(length)]
        request = fake_request(request_id, ids, max_tokens=1, texts=texts, **fields)
        request.spec = RequestSpec(PoolingParams(task="embed"), 0)
        self.scheduler.add(request)

    def plan(self):
        """The texts that the next step computes, by request: the first token of each."""
        step = self.scheduler.schedule()
        if step is None:
            return None
        found = {}
        for request in step.new_requests:
            starts = [sum(text.num_tokens for text in request.texts[:i]) for i in range(len(request.texts))]
            found[request.request_id] = [request.token_ids[start] for start in starts or [0]]
            assert len(request.token_ids) == sum(text.num_tokens for text in request.texts) or not starts
        assert step.num_tokens == sum(len(request.token_ids) for request in step.new_requests)
        self.steps.append((step.step_id, found))
        return found

    def read(self, errors=None):
        """What the oldest step brought: (request, results, reason) of each."""
        step_id, found = self.steps.pop(0)
        pooled = {name: Pooled(bytes(firsts), [len(firsts)]) for name, firsts in found.items()}
        result = ModelRunnerOutput(step_id, [[] for _ in found], pooled=pooled, errors=errors or {})
        return [
            (output.request_id, list(output.pooled.data) if output.pooled else None, output.finish_reason)
            for output in self.scheduler.update(result)
        ]


def test_steps_take_as_many_texts_as_fit():
    d = Driver()
    d.add("list", 4, 4, 4, 9, 1, 1)
    assert d.plan() == {"list": [0, 1]}
    assert d.scheduler.stats().num_waiting == d.scheduler.num_open == 4
    assert d.read() == [("list", [0, 1], None)]
    assert d.plan() == {"list": [2]}
    assert d.plan() == {"list": [3, 4]}  # while the one before is in flight
    assert d.read() == [("list", [2], None)]
    assert d.plan() == {"list": [5]}
    assert d.plan() is None
    assert d.read() == [("list", [3, 4], None)]
    assert d.read() == [("list", [5], FinishReason.STOP)]
    assert not d.scheduler.has_requests


def test_a_text_has_a_seat_for_its_step():
    d = Driver(max_num_seqs=3)
    d.add("list", 1, 1, 1, 1, 1)
    d.add("behind", 1)
    assert d.plan() == {"list": [0, 1, 2]}
    assert d.plan() == {"list": [3, 4], "behind": [0]}
    d.read()
    assert d.read() == [("list", [3, 4], FinishReason.STOP), ("behind", [0], FinishReason.STOP)]


def test_lists_share_a_step_with_others():
    d = Driver()
    d.add("one", 2)
    d.add("list", 2, 3)
    d.add("other", 2, 5)
    assert d.plan() == {"one": [0], "list": [0, 1], "other": [0]}
    assert d.read()[1:] == [("list", [0, 1], FinishReason.STOP), ("other", [0], None)]
    assert d.plan() == {"other": [1]}


def test_whoever_goes_first_passes_a_list_between_its_steps():
    d = Driver(scheduling_policy="priority")
    d.add("list", 6, 6, 6)
    assert d.plan() == {"list": [0]}
    d.add("urgent", 6, priority=-1)
    d.add("late", 6, priority=1)
    assert [d.plan() for _ in range(4)] == [{"urgent": [0]}, {"list": [1]}, {"list": [2]}, {"late": [0]}]


def test_lists_in_bulk_let_others_pass():
    d = Driver()
    d.add("bulk", 6, 6, 6, in_bulk=True)
    assert d.plan() == {"bulk": [0]}
    d.add("asked", 6)
    assert [d.plan() for _ in range(3)] == [{"asked": [0]}, {"bulk": [1]}, {"bulk": [2]}]
    assert [d.read()[0][2] for _ in range(4)] == [None, FinishReason.STOP, None, FinishReason.STOP]


def test_turns_of_tenants_are_charged_for_texts():
    d = Driver(scheduling_policy="fair")
    d.add("mine", 6, 6, 6, tenant="me")
    d.add("yours", 6, 6, 6, tenant="you")
    assert sorted(map(str, (d.plan() for _ in range(2)))) == ["{'mine': [0]}", "{'yours': [0]}"]


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_an_aborted_list_is_gone_with_its_last_step(num_steps):
    d = Driver()
    d.add("list", 6, 6)
    for _ in range(num_steps):
        d.plan()
    d.scheduler.abort(["list"])
    assert d.plan() is None
    for _ in range(num_steps):
        assert d.scheduler.has_requests
        assert d.read() == []
    assert not d.scheduler.has_requests


def test_a_list_whose_time_is_over_says_so():
    d = Driver()
    d.add("list", 6, 6)
    d.plan()
    [output] = d.scheduler.time_out(["list"])
    assert output.finish_reason is FinishReason.TIMEOUT
    assert d.read() == [] and not d.scheduler.has_requests


def test_an_error_ends_the_list():
    d = Driver()
    d.add("list", 6, 6)
    d.plan()
    assert d.read({"list": "broken"}) == [("list", None, FinishReason.ERROR)]
    assert d.plan() is None and not d.scheduler.has_requests


def test_no_text_may_be_longer_than_the_model_takes():
    with pytest.raises(PromptTooLong, match="11 tokens"):
        Driver().add("list", 1, 11)
