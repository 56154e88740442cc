"""The core's process from inside: what it says when a thread, the core or the first message is at fault."""

import subprocess
import sys
import threading
import time

import psutil
import pytest

from octavo.base.transport import Mailbox, Receiver, Sender
from octavo.engine.process import CoreProcess
from octavo.messages.control import (
    Abort,
    Call,
    Failed,
    FrontMessage,
    Ready,
    Reply,
    Shutdown,
    Start,
    core_pipe,
    front_pipe,
)
from octavo.messages.request import EngineOutputs, FinishReason
from octavo.messages.sampling import SamplingParams
from tests.fakes import fake_request
from tests.process_fakes import ObedientExecutor, is_alive, process_config, wait_until


class Front:
    """A CoreProcess on a thread of this process, and the front's ends of its pipes."""

    def __init__(self, mailbox):
        self.receiver = Receiver(mailbox.address(front_pipe(0)), FrontMessage)
        self.sender = Sender(mailbox.address(core_pipe(1)))
        self.core = CoreProcess(mailbox)
        self.exit_code = None
        self.thread = threading.Thread(target=self.run)

    def run(self):
        self.exit_code = self.core.run()

    def start(self, **orders):
        self.thread.start()
        self.sender.send(Start(process_config(**orders).to_msgpack()))

    def end(self):
        self.thread.join(10)
        assert not self.thread.is_alive()
        self.receiver.close()
        self.sender.close()
        return self.exit_code


@pytest.fixture
def front():
    mailbox = Mailbox.create()
    yield Front(mailbox)
    mailbox.close()


def test_shutdown_aborts_what_is_open(front):
    front.start()
    assert isinstance(front.receiver.receive(5), Ready)
    front.sender.send(fake_request("a", [1], 50))
    front.sender.send(fake_request("b", [1], 50))
    front.sender.send(Shutdown())
    ends = []
    while not isinstance(message := front.receiver.receive(5), Shutdown):
        ends += [(o.request_id, o.finish_reason) for o in message.outputs if o.finish_reason]
    assert ends == [("a", FinishReason.ABORT), ("b", FinishReason.ABORT)]
    assert front.end() == 0


@pytest.mark.parametrize("is_told", [True, False], ids=["used", "not_used"])
def test_a_process_started_ahead(is_told):
    """It becomes the core that is started next; without one, it ends with its parent."""
    program = f"""
import sys
from octavo.base.processes import Child, start_ahead
from octavo.base.transport import Mailbox, Receiver, Sender
from octavo.messages.control import FrontMessage, Start, core_pipe, front_pipe
from tests.process_fakes import process_config
start_ahead("octavo.engine.process")
mailbox, ends = Mailbox.create(), []
if {is_told}:
    pipe = Sender(mailbox.address(core_pipe(1)))
    pipe.send(Start(process_config().to_msgpack()))
    core = Child("octavo.engine.process", str(mailbox.path), "1", on_exit=ends.append)
    print(type(Receiver(mailbox.address(front_pipe(0)), FrontMessage).receive(60)).__name__)
"""
    command = [sys.executable, "-c", program + "mailbox.close()\nprint(input())"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        if is_told:
            assert parent.stdout.readline() == "Ready\n"
        found = psutil.Process(parent.pid)
        assert wait_until(
            lambda: [c.cmdline()[-1:] for c in found.children()] == [["octavo.engine.process"]], 60
        )
        [core] = found.children()
        parent.communicate("end\n", 60)
    assert parent.returncode == 0 and wait_until(lambda: not is_alive(core.pid), 90)


def test_a_pause_is_used_until_nothing_is_left_or_a_request_comes(front, monkeypatch):
    left, uses = [True] * 3, []
    has_come = threading.Event()

    def use(executor):
        uses.append(has_come.is_set())
        return bool(left and left.pop())

    monkeypatch.setattr(ObedientExecutor, "use_pause", use)
    front.start(step_s=0.01)
    assert isinstance(front.receiver.receive(5), Ready)
    assert wait_until(lambda: len(uses) >= 4, 5)
    has_come.set()
    front.sender.send(fake_request("a", [1], 5))
    while not (outputs := front.receiver.receive(5).outputs) or not outputs[-1].finish_reason:
        pass
    front.sender.send(Shutdown())
    assert front.end() == 0 and not left


def test_the_first_message_must_be_start(front):
    front.thread.start()
    front.sender.send(Abort(["a"]))
    assert front.receiver.receive(5) == Failed("The first message must be Start, not Abort.")
    assert front.end() == 1


def test_a_config_that_is_none(front):
    front.thread.start()
    front.sender.send(Start(b"\x80"))
    failed = front.receiver.receive(5)
    assert failed.kind == "ConfigError"
    assert "field of the wrong type" in failed.error
    assert front.end() == 1


def test_a_second_start_is_dropped(front):
    front.start()
    assert isinstance(front.receiver.receive(5), Ready)
    front.sender.send(Start(b""))
    front.sender.send(fake_request("a", [1], 1))
    assert isinstance(front.receiver.receive(5), EngineOutputs)
    front.sender.send(Shutdown())
    assert front.end() == 0


def test_the_end_of_the_reading_thread_is_the_end_of_the_core(front, monkeypatch):
    answers = [Start(process_config().to_msgpack()), None]
    monkeypatch.setattr(front.core._incoming, "receive", lambda: answers.pop(0) or [].pop())
    front.thread.start()
    assert isinstance(front.receiver.receive(5), Ready)
    assert front.receiver.receive(5) == Failed("IndexError: pop from empty list")
    assert front.end() == 1


def test_a_failing_step(front):
    front.start(fault="0:raise")
    assert isinstance(front.receiver.receive(5), Ready)
    front.sender.send(fake_request("a", [1]))
    assert front.receiver.receive(5) == Failed("A step failed: RuntimeError: the fake was told to fail")
    assert front.end() == 1


def test_time_runs_out_while_nothing_is_computed(front):
    """The loop sleeps, and wakes up for the end of a request's time."""
    front.start()
    assert isinstance(front.receiver.receive(5), Ready)
    front.sender.send(Call(1, "pause", {"freeze": True}))
    front.sender.send(
        fake_request("a", [1], arrival_s=time.monotonic(), sampling=SamplingParams(timeout_s=0.2))
    )
    assert front.receiver.receive(5) == Reply(1, True)
    begun_s = time.monotonic()
    [output] = front.receiver.receive(5).outputs
    assert (output.request_id, output.finish_reason) == ("a", FinishReason.TIMEOUT)
    assert time.monotonic() - begun_s < 2.0
    assert front.receiver.receive(0.2) is None, "after that it sleeps on"
    front.sender.send(Shutdown())
    assert front.end() == 0
