"""What takes time waits beside the loop; what refers to it stays behind it; all else passes."""

import threading
from queue import SimpleQueue
from types import SimpleNamespace

from octavo.engine.preparation import Preparation
from octavo.messages.control import Abort, Call, Detach
from octavo.messages.structured import Constraint
from tests.fakes import fake_request


def test_order():
    gate, delivered, prepared = threading.Event(), SimpleQueue(), []

    def prepare(request):
        gate.wait(10)
        prepared.append(request.request_id)

    core = SimpleNamespace(takes_time=lambda request: request.constraint is not None, prepare=prepare)
    preparation = Preparation(core, delivered.put)
    plain = fake_request("plain", [1])
    slow = fake_request("slow", [1], constraint=Constraint("", "", ""))
    first, later = Abort(["plain"]), [Abort(["slow"]), Detach(1)]
    for message in (first, slow, *later, plain, Call(1, "stats")):
        preparation.take(message)
    assert [delivered.get(timeout=5) for _ in range(3)] == [first, plain, Call(1, "stats")]
    assert delivered.empty()
    gate.set()
    assert [delivered.get(timeout=5) for _ in range(3)] == [slow, *later]
    assert prepared == ["slow"]
