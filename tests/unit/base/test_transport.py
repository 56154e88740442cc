"""Pipes: order, back-pressure, waking up, garbage, early senders, private directories."""

import asyncio
import os
import stat
import tempfile
import threading
import time
from unittest.mock import patch

import msgspec
import pytest
import zmq

from octavo.base.errors import Overloaded
from octavo.base.transport import AsyncReceiver, BadFrame, Broadcaster, Mailbox, Receiver, Sender


class Number(msgspec.Struct, array_like=True, tag="number"):
    value: int


class Text(msgspec.Struct, array_like=True, tag="text"):
    value: str


Message = Number | Text


@pytest.fixture
def mailbox():
    mailbox = Mailbox.create()
    yield mailbox
    mailbox.close()


def test_directory_is_private_and_removed():
    mailbox = Mailbox.create()
    assert stat.S_IMODE(mailbox.path.stat().st_mode) == 0o700
    mailbox.close()
    mailbox.close()
    assert not mailbox.path.exists()


def test_what_killed_processes_left_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed, young, living = Mailbox.create(), Mailbox.create(), Mailbox.create()
    for dead in (killed, young):
        os.close(dead._lock)
        dead._lock = None
    for old in (killed, living):
        (old.path / "core").touch()
        os.utime(old.path / "lock", (0, 0))
    new = Mailbox.create()
    assert not killed.path.exists()
    assert young.path.exists()
    assert living.path.exists()
    for mailbox in (young, living, new):
        mailbox.close()


def make_fifo(folder):
    os.mkfifo(folder / "lock")


def make_link(folder):
    (folder.parent / "elsewhere").write_text("octavo mailbox\n")
    (folder / "lock").symlink_to(folder.parent / "elsewhere")


def make_other_lock(folder):
    (folder / "lock").write_text("")


def make_mailbox_open_to_others(folder):
    (folder / "lock").write_text("octavo mailbox\n")
    folder.chmod(0o777)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("make", [make_fifo, make_link, make_other_lock, make_mailbox_open_to_others])
def test_what_is_no_mailbox_of_ours_is_left_alone(tmp_path, monkeypatch, make):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / "octavo-x"
    folder.mkdir(mode=0o700)
    (folder / "notes").write_text("mine")
    make(folder)
    os.utime(folder / "lock", (0, 0))
    Mailbox.create().close()
    assert (folder / "notes").read_text() == "mine"


def test_a_mailbox_of_somebody_else_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed = Mailbox.create()
    os.close(killed._lock)
    os.utime(killed.path / "lock", (0, 0))
    with patch("os.geteuid", lambda: os.getuid() + 1):
        Mailbox.create()
    assert killed.path.exists()
    Mailbox.create().close()
    assert not killed.path.exists()


def test_long_temporary_directory(tmp_path, monkeypatch):
    deep = tmp_path / ("x" * 90)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    mailbox = Mailbox.create()
    receiver = Receiver(mailbox.address("a"), Message)
    receiver.close()
    mailbox.close()


def test_messages_arrive_in_order_also_those_sent_before_the_receiver_exists(mailbox):
    sender = Sender(mailbox.address("a"))
    sent = [Number(i) if i % 2 else Text(str(i)) for i in range(100)]
    for message in sent[:50]:
        sender.send(message)
    receiver = Receiver(mailbox.address("a"), Message)
    for message in sent[50:]:
        sender.send(message)
    assert [receiver.receive(5) for _ in sent] == sent
    assert receiver.receive(0.01) is None
    sender.close()
    receiver.close()


def test_close_lets_queued_messages_leave(mailbox):
    receiver = Receiver(mailbox.address("a"), Message)
    sender = Sender(mailbox.address("a"))
    for i in range(1000):
        sender.send(Number(i))
    sender.close()
    assert [receiver.receive(5) for _ in range(1000)] == [Number(i) for i in range(1000)]
    receiver.close()


def test_close_without_a_peer_is_bounded(mailbox):
    sender = Sender(mailbox.address("nobody"))
    sender.send(Number(1))
    began = time.monotonic()
    sender.close(linger_s=0.2)
    assert time.monotonic() - began < 2


def test_interrupt_wakes_a_blocked_receiver(mailbox):
    receiver = Receiver(mailbox.address("a"), Message)
    got = []
    thread = threading.Thread(target=lambda: got.append(receiver.receive()))
    thread.start()
    receiver.interrupt()
    thread.join(5)
    assert got == [None]
    receiver.close()


def test_garbage_is_a_bad_frame_and_disturbs_nothing(mailbox):
    receiver = Receiver(mailbox.address("a"), Message)
    with zmq.Context() as context, context.socket(zmq.PUSH) as intruder:
        intruder.connect(mailbox.address("a"))
        intruder.send(b"\xc1 garbage")
        intruder.send(msgspec.msgpack.encode(Number(7)))
        with pytest.raises(BadFrame, match="not a known message"):
            receiver.receive(5)
        assert receiver.receive(5) == Number(7)
    receiver.close()


def test_a_full_queue_holds_up_and_loses_nothing(mailbox):
    sender = Sender(mailbox.address("a"))
    num_sent = 0
    with pytest.raises(Overloaded):
        while True:
            sender.try_send(Number(num_sent))
            num_sent += 1
    receiver = Receiver(mailbox.address("a"), Message)
    assert [receiver.receive(5) for _ in range(num_sent)] == [Number(i) for i in range(num_sent)]
    sender.close()
    receiver.close()


def test_what_cannot_be_encoded_is_refused_before_anything_is_sent(mailbox):
    receiver = Receiver(mailbox.address("a"), Message)
    sender = Sender(mailbox.address("a"))
    with pytest.raises(TypeError):
        sender.send(Text(object()))
    sender.send(Text("fine"))
    assert receiver.receive(5) == Text("fine")
    sender.close()
    receiver.close()


def test_broadcast_reaches_every_peer(mailbox):
    addresses = [mailbox.address(name) for name in "abc"]
    receivers = [Receiver(address, Message) for address in addresses]
    broadcaster = Broadcaster(addresses)
    broadcaster.send(Number(1))
    broadcaster.send(Number(2))
    for receiver in receivers:
        assert [receiver.receive(5), receiver.receive(5)] == [Number(1), Number(2)]
        receiver.close()
    broadcaster.close()


async def test_async_receiver(mailbox):
    receiver = AsyncReceiver(mailbox.address("a"), Message)
    sender = Sender(mailbox.address("a"))
    waiting = asyncio.create_task(receiver.receive())
    await asyncio.sleep(0)
    sender.send(Number(1))
    assert await asyncio.wait_for(waiting, 5) == Number(1)
    waiting = asyncio.create_task(receiver.receive())
    await asyncio.sleep(0)
    waiting.cancel()
    sender.send(Number(2))
    assert await asyncio.wait_for(receiver.receive(), 5) == Number(2)
    sender.close()
    receiver.close()
