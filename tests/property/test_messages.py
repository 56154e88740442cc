"""Every message survives the wire, and whatever else comes over it is a BadFrame (RELIABILITY.md, I-29)."""

import typing

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.base.transport import BadFrame, decode
from octavo.messages.control import CoreMessage, FrontMessage
from octavo.messages.worker import WorkerCommand, WorkerReply
from tests.structs import instances

DOORS = {"core": CoreMessage, "front": FrontMessage, "command": WorkerCommand, "reply": WorkerReply}
DECODERS = {name: msgspec.msgpack.Decoder(door) for name, door in DOORS.items()}
MEMBERS = [
    pytest.param(door, kind, id=f"{door}-{kind.__name__}")
    for door, union in DOORS.items()
    for kind in typing.get_args(union)
]


@pytest.mark.matrix(4)
@pytest.mark.parametrize(("door", "kind"), MEMBERS)
@settings(deadline=None)
@given(data=st.data())
def test_round_trip(door, kind, data):
    message = data.draw(instances(kind))
    received = decode(DECODERS[door], msgspec.msgpack.encode(message))
    assert type(received) is kind
    assert received == message


@pytest.mark.parametrize("door", DOORS)
@settings(deadline=None)
@given(frame=st.binary(max_size=200))
def test_random_bytes(door, frame):
    _decodes_or_bad_frame(door, frame)


@pytest.mark.matrix(4)
@pytest.mark.parametrize(("door", "kind"), MEMBERS)
@settings(deadline=None)
@given(data=st.data())
def test_damaged_messages(door, kind, data):
    frame = bytearray(msgspec.msgpack.encode(data.draw(instances(kind))))
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    _decodes_or_bad_frame(door, bytes(frame[: data.draw(st.integers(0, len(frame)))]))


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\xdd\xff\xff\xff\xff", id="list of four billion"),
        pytest.param(b"\xdb\xff\xff\xff\xff", id="text of four gigabytes"),
        pytest.param(b"\x93\xa5reply\x01" + b"\x91" * 100_000 + b"\x01", id="nested too deep"),
        pytest.param(msgspec.msgpack.encode(["no such message", 1]), id="unknown tag"),
    ],
)
def test_hostile_frames(door, frame):
    with pytest.raises(BadFrame):
        decode(DECODERS[door], frame)


def _decodes_or_bad_frame(door, frame):
    try:
        message = decode(DECODERS[door], frame)
    except BadFrame:
        return
    assert isinstance(message, typing.get_args(DOORS[door]))
