"""Tokens that come back to the first stage reach their rows, whoever has these meanwhile."""

from types import SimpleNamespace

import numpy as np
import torch

from octavo.messages.kv import CachePlan
from octavo.messages.step import NewRequest
from octavo.runtime.heads.head import Computed
from octavo.runtime.heads.stage import StageHead
from octavo.runtime.worker.prepare import Work
from octavo.runtime.worker.request_state import RequestState
from tests.fakes import fake_groups, fake_request


class Tokens:
    """What the last stage would send, and how many of its messages were waited for."""

    is_first, size = True, 2

    def __init__(self, *messages):
        self.messages, self.num_waits = list(messages), 0

    def start_receiving(self, x, rank):
        message = self.messages.pop(0)

        def wait():
            self.num_waits += 1
            x.copy_(torch.tensor(message))

        return wait


def first_stage(*messages):
    state = RequestState(2, 20, CachePlan(fake_groups(0), 9, 4), torch.device("cpu"))
    tokens = Tokens(*messages)
    return state, tokens, StageHead(state, tokens)


def enter(state, name):
    row = state.add(NewRequest(name, [7, 7], 2, fake_request(name, [7, 7]).spec))
    state.flush()
    return row


def step(head, rows, computed):
    rows, computed = np.array(rows), np.array(computed)
    work = Work(rows, computed, computed + 1, np.arange(len(rows) + 1), np.arange(len(rows)), rows)
    head.settle(SimpleNamespace(), rows)
    head.finish(SimpleNamespace(), Computed(None, work, torch.zeros(1), None), None)


def test_a_step_waits_for_the_tokens_that_it_computes_and_for_no_others():
    state, tokens, head = first_stage([11], [12], [13])
    a, b = enter(state, "a"), enter(state, "b")
    step(head, [a], [1])
    step(head, [b], [1])
    assert tokens.num_waits == 0
    assert state.num_tokens.tolist() == [3, 3], "lengths are known before the tokens"
    step(head, [a], [2])
    assert tokens.num_waits == 1
    assert state.host_tokens[a, :3].tolist() == [7, 7, 11]


def test_a_row_gets_another_owner_behind_the_tokens_of_the_last_one():
    state, tokens, head = first_stage([11], [12])
    a = enter(state, "a")
    step(head, [a], [1])
    head.remove(state.release("a"))
    assert tokens.num_waits == 1
    b = state.add(NewRequest("b", [5, 6, 8, 9], 4, fake_request("b", [5]).spec))
    assert a == b
    state.flush()
    step(head, [b], [3])
    assert state.host_tokens[b, :4].tolist() == [5, 6, 8, 9], "nothing of the earlier owner comes late"
