"""Who gets what of a core with several fronts, and what becomes of one that is gone or does not read."""

import msgspec
import pytest

from octavo.base import faults
from octavo.base.transport import Mailbox, Receiver
from octavo.engine.fronts import Fronts
from octavo.messages.control import FrontMessage, Ready, Reply, front_pipe
from octavo.messages.kv import CachePlan
from octavo.messages.request import EngineOutput, EngineOutputs, FinishReason, SchedulerStats
from tests.fakes import fake_request

READY = Ready(CachePlan([], 8, 4), 64, 1)


class Party:
    """Fronts, and a receiver for each."""

    def __init__(self, num_fronts=3):
        self.now = 0.0
        self.mailbox = Mailbox.create()
        self.fronts = Fronts(self.mailbox, clock=lambda: self.now)
        self.fronts.admit(num_fronts)
        self.receivers = [self.bind(front) for front in range(num_fronts)]
        self.num_steps = 0

    def bind(self, front):
        return Receiver(self.mailbox.address(front_pipe(front)), FrontMessage)

    def add(self, *owners):
        for number, front in enumerate(owners):
            self.fronts.own(msgspec.structs.replace(fake_request(f"r{number}", [1]), front=front))

    def deliver(self, *outputs, steps=1):
        self.num_steps += steps
        stats = SchedulerStats(num_steps=self.num_steps)
        self.fronts.deliver(EngineOutputs([EngineOutput(i, [7]) for i in outputs], stats))

    def heard(self, front):
        """Everything that is there for a front."""
        messages = []
        while (message := self.receivers[front].receive(0.2)) is not None:
            messages.append(message)
        return messages

    def ids_heard(self, front):
        return [[output.request_id for output in message.outputs] for message in self.heard(front)]

    def close(self):
        self.fronts.close()
        for receiver in self.receivers:
            receiver.close()
        self.mailbox.close()


@pytest.fixture
def party():
    party = Party()
    yield party
    party.close()
    faults.arm("")


def test_outputs_go_to_their_owners_and_steps_to_the_first(party):
    party.add(0, 1, 2, 1)
    party.deliver("r0", "r1", "r3")
    party.deliver("r2")
    assert party.ids_heard(0) == [["r0"], []]
    assert party.ids_heard(1) == [["r1", "r3"]]
    assert party.ids_heard(2) == [["r2"]]


def test_all_hear_that_the_core_lives(party):
    party.add(1)
    for _ in range(10):
        party.now += 0.3
        party.deliver("r0", steps=0)
    assert [len(party.heard(front)) for front in (0, 1, 2)] == [5, 10, 5]


def test_what_nobody_owns_is_not_sent(party):
    party.add(5, -1)
    party.fronts.disown(["r1"])
    party.deliver("r0", "r1", "unknown")
    assert party.ids_heard(0) == [["r0"]], "a front that there is not: the owner of the core"


def test_a_front_that_is_alone():
    party = Party(1)
    party.add(0, 0)
    party.deliver("r0", "r1")
    party.deliver(steps=0)
    party.fronts.abort_all()
    assert party.ids_heard(0) == [["r0", "r1"], ["r0", "r1"]], "the step, and the end"
    party.close()


def test_the_first_owner_of_an_id_keeps_it(party):
    party.add(1)
    party.fronts.own(msgspec.structs.replace(fake_request("r0", [1]), front=2))
    party.deliver("r0")
    assert party.ids_heard(1) == [["r0"]]


def test_a_front_that_is_replaced(party):
    party.add(1, 2, 1)
    party.fronts.greet(READY)
    assert party.heard(1) == [READY]
    party.fronts.tell(1, Reply(1))
    party.receivers[1].close()
    party.fronts.detach(1)
    assert sorted(party.fronts.take_orphans()) == ["r0", "r2"]
    assert party.fronts.take_orphans() == []
    party.receivers[1] = party.bind(1)
    assert party.heard(1) == [READY]
    party.deliver("r0", "r1")
    assert party.ids_heard(1) == []
    party.fronts.detach(0)
    party.fronts.detach(9)
    assert party.fronts.take_orphans() == [], "the core's own front is not to be detached"


def test_a_front_that_stops_reading_holds_nobody_up(party):
    party.fronts.greet(READY)
    party.add(1, 2)
    for front in (1, 2):
        party.heard(front)
    party.receivers[1].close()
    for _ in range(10_010):
        party.fronts.tell(1, Reply(1))
    assert party.fronts.take_orphans() == ["r0"]
    party.deliver("r1")
    assert party.ids_heard(2) == [["r1"]]
    party.receivers[1] = party.bind(1)
    assert party.heard(1)[0] == READY


def test_all_are_told_the_end(party):
    party.add(0, 2, 2)
    party.fronts.abort_all()
    for front, ids in enumerate((["r0"], [], ["r1", "r2"])):
        [message] = party.heard(front)
        assert [(o.request_id, o.finish_reason) for o in message.outputs] == [
            (i, FinishReason.ABORT) for i in ids
        ]


def test_an_output_that_cannot_be_encoded_ends_its_request_only(party):
    party.add(1, 1, 1)
    bad = EngineOutput("r1", [7], stop_reason="\ud800")
    outputs = [EngineOutput("r0", [7]), bad, EngineOutput("r2", [7])]
    party.fronts.deliver(EngineOutputs(outputs, SchedulerStats()))
    [message] = party.heard(1)
    assert [(o.request_id, o.new_token_ids, o.finish_reason) for o in message.outputs] == [
        ("r0", [7], None),
        ("r1", [], FinishReason.ERROR),
        ("r2", [7], None),
    ]
    assert party.fronts.take_orphans() == ["r1"]
    party.deliver("r0", "r1")
    assert party.ids_heard(1) == [["r0"]]
