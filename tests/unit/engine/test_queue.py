"""Requests, policies, the two queues and the stop tests."""

import pytest

from octavo.base.errors import ConfigError
from octavo.engine.scheduler.bulk_seats import BulkSeats
from octavo.engine.scheduler.policies import POLICIES, Policy
from octavo.engine.scheduler.policies.orders import FirstComeFirstServed, PriorityFirst
from octavo.engine.scheduler.queue import RunningSet, WaitingQueue
from octavo.engine.scheduler.request import Request, RequestStatus
from octavo.engine.scheduler.stops import Stop, find_stop
from octavo.messages.request import FinishReason
from octavo.messages.sampling import SamplingParams
from tests.fakes import fake_request


def request(sequence=0, prompt=(1, 2, 3), max_model_len=100, **fields):
    return Request.create(fake_request(f"r{sequence}", list(prompt), **fields), sequence, max_model_len, 4)


class Tables(Policy):
    """A policy of two lines, even and odd seeds, whose turns are set by hand."""

    takes_turns = True

    def __init__(self):
        self.turns = {"even": 0.0, "odd": 1.0}

    def key(self, request):
        return (request.standing.arrival_s,)

    def line(self, request):
        return "odd" if request.spec.seed % 2 else "even"

    def turn(self, line):
        return self.turns[line]


def test_states_change_as_drawn():
    for path in (
        ["RUNNING", "PREEMPTED", "RUNNING", "FINISHED"],
        ["FINISHED"],
        ["RUNNING", "PREEMPTED", "FINISHED"],
    ):
        one = request()
        for status in path:
            one.move_to(RequestStatus[status])
        assert one.is_finished
        with pytest.raises(AssertionError, match="FINISHED cannot become RUNNING"):
            one.move_to(RequestStatus.RUNNING)
    with pytest.raises(AssertionError):
        request().move_to(RequestStatus.PREEMPTED)


def test_length_is_bounded_by_max_tokens_and_context():
    assert request(max_tokens=5).max_total_tokens == 8
    assert request(max_tokens=50, max_model_len=10).max_total_tokens == 10


def test_registry_knows_the_policies():
    assert POLICIES.load("fcfs") is FirstComeFirstServed and POLICIES.load("priority") is PriorityFirst
    assert POLICIES.names() == ["deadline", "fair", "fcfs", "lpm", "priority"]
    with pytest.raises(ConfigError, match="fcfs, lpm, priority"):
        POLICIES.load("random")


def test_fcfs_goes_by_arrival_then_by_order_of_add():
    queue = WaitingQueue(FirstComeFirstServed(), BulkSeats(8))
    requests = [request(i, arrival_s=t) for i, t in enumerate([5.0, 1.0, 5.0, 0.5])]
    for one in requests:
        queue.add(one)
    assert [one.sequence for one in queue.first(9)] == [3, 1, 0, 2]
    queue.remove(requests[1])
    queue.add(requests[1])  # as after a preemption
    assert [one.sequence for one in queue.first(2)] == [3, 1] and len(queue) == 4


def test_priority_goes_first_smaller_first():
    queue = WaitingQueue(PriorityFirst(), BulkSeats(8))
    for i, priority in enumerate([1, 0, -1, 0]):
        queue.add(request(i, priority=priority, arrival_s=float(-i)))
    assert [one.sequence for one in queue.first(9)] == [2, 3, 1, 0]


def test_running_oldest_is_served_first_whatever_the_policy_says():
    running = RunningSet(PriorityFirst())
    requests = [request(i, priority=-i, arrival_s=float(i)) for i in range(4)]
    for one in reversed(requests):
        running.add(one)
    assert [one.sequence for one in running.in_order()] == [0, 3, 2, 1]
    running.remove(requests[0])
    assert [one.sequence for one in running.in_order()] == [1, 3, 2]
    running.in_order().clear()
    assert len(running.in_order()) == len(running) == 3


def test_lines_keep_their_order_and_take_turns():
    policy = Tables()
    queue, running = WaitingQueue(policy, BulkSeats(8)), RunningSet(policy)
    requests = [request(i, seed=i) for i in range(6)]
    for one in reversed(requests):
        queue.add(one)
        running.add(one)
    assert [one.sequence for one in queue.first(9)] == [0, 2, 4, 1, 3, 5]
    assert [one.sequence for one in running.in_order()] == [0, 2, 4, 1, 3, 5]
    policy.turns["even"] = 2.0
    assert [one.sequence for one in queue.first(9)] == [1, 3, 5, 0, 2, 4]
    assert [one.sequence for one in running.in_order()] == [0, 1, 3, 5, 2, 4], "the oldest stays the first"


def test_lines_are_charged_while_the_queue_is_read():
    policy = Tables()
    queue = WaitingQueue(policy, BulkSeats(8))
    for i in range(8):
        queue.add(request(i, seed=i))
    order = []
    for one in queue.first(7):
        queue.remove(one)
        policy.turns[policy.line(one)] += 1 if one.spec.seed % 2 else 3
        order.append(one.sequence)
    assert order == [0, 1, 3, 2, 5, 7, 4]
    assert [one.sequence for one in queue.first(9)] == [6]
    assert list(queue.first(0)) == [] and list(WaitingQueue(policy, BulkSeats(8)).first(9)) == []


def after(outputs, **fields):
    one = request(**fields)
    one.token_ids += outputs
    return find_stop(one)


def test_stops():
    stop_8 = SamplingParams(stop_token_ids=[8, 9])
    held = SamplingParams(stop_token_ids=[8], min_tokens=3)
    assert after([5], eos=[7]) is None
    assert after([5, 7], eos=[7]) == Stop(FinishReason.STOP)
    assert after([5, 7]) is None
    assert after([8], sampling=stop_8) == Stop(FinishReason.STOP, 8)
    assert after([7], eos=[7], sampling=SamplingParams(stop_token_ids=[7])) == Stop(FinishReason.STOP)
    assert after([1, 1], max_tokens=2) == Stop(FinishReason.LENGTH)
    assert after([1, 7], max_tokens=2, eos=[7]) == Stop(FinishReason.STOP)
    assert after([1], max_tokens=50, max_model_len=4) == Stop(FinishReason.LENGTH)
    assert after([1, 8], sampling=held) is None
    assert after([1, 1, 8], sampling=held) == Stop(FinishReason.STOP, 8)
    assert after([8], max_tokens=1, sampling=held) == Stop(FinishReason.LENGTH)
