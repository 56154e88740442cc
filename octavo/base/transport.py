"""Typed messages between processes: msgspec structs as msgpack frames over ZeroMQ.

One-way pipes within a machine: a `Sender` (one peer) or `Broadcaster` (many) and a `Receiver` of one closed
union of structs. The receiving end binds, so a sender may speak before its peer exists. Addresses are `ipc://`
files inside a directory of mode 0700; between machines frames go over a `link`, the only other user of zmq. A
frame that does not decode raises `BadFrame` and disturbs nothing else.
Both ends bound their queues; a full queue holds the sender up (back-pressure), it never drops.
"""

import asyncio
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zmq
import zmq.asyncio

from octavo.base.errors import OctavoError, Overloaded
from octavo.base.ownership import is_private

T = TypeVar("T")
HIGH_WATER_MARK = 10_000
_RECONNECT_MS = 10
_PREFIX, _LOCK = "octavo-", "lock"
_MARK = b"octavo mailbox\n"
"""Content of the lock: what has another one is no mailbox."""
_SETTLED_S = 60.0
"""A mailbox younger than that may not hold its lock yet."""
_LONGEST_DIRECTORY = 80
"""Characters; the path of a socket may have 107 in all."""


class BadFrame(OctavoError):
    """A frame that is not a message of the expected kind."""


class Mailbox:
    """A private directory for ipc sockets; whoever knows its path can attach to it.

    Who made it holds a lock on a file in it, so that it can be told from one whose makers were killed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    @classmethod
    def create(cls, parent: Path | None = None) -> "Mailbox":
        """Make a new directory of mode 0700, and remove what killed processes have left.

        parent: None = where temporary files go
        """
        fits = len(tempfile.gettempdir()) < _LONGEST_DIRECTORY
        mailbox = cls(Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent or (None if fits else "/tmp"))))
        mailbox._lock = os.open(mailbox.path / _LOCK, os.O_CREAT | os.O_RDWR, mode=0o600)
        fcntl.flock(mailbox._lock, fcntl.LOCK_EX)
        os.write(mailbox._lock, _MARK)
        for folder in mailbox.path.parent.glob(f"{_PREFIX}*"):
            _remove_if_left(folder)
        return mailbox

    def address(self, name: str) -> str:
        """The address of the pipe `name` in this directory."""
        return f"ipc://{self.path / name}"

    def close(self) -> None:
        """Remove the directory and what is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class Broadcaster(Generic[T]):
    """The sending end of one pipe per address; every message goes to all. Owned by one thread."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._context = zmq.Context()
        self._sockets = [connect(self._context, address) for address in addresses]
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: T) -> None:
        """Encode once and queue for every peer; waits while a queue is full.

        Raises TypeError or ValueError, before anything is sent, for a message that msgpack cannot hold.
        """
        self.send_frame(self._encoder.encode(message))

    def send_frame(self, frame: bytes) -> None:
        """Queue a message that is encoded already."""
        for socket in self._sockets:
            socket.send(frame, copy=False)

    def close(self, linger_s: float = 1.0) -> None:
        """Close, waiting at most `linger_s` for queued messages to leave."""
        for socket in self._sockets:
            socket.close(linger=int(linger_s * 1000))
        self._context.term()


class Sender(Broadcaster[T]):
    """The sending end of one pipe. Owned by one thread."""

    def __init__(self, address: str) -> None:
        super().__init__([address])

    def try_send(self, message: T) -> None:
        """As `send`, but raises Overloaded instead of waiting."""
        try:
            self._sockets[0].send(self._encoder.encode(message), flags=zmq.DONTWAIT, copy=False)
        except zmq.Again:
            behind = f"The receiver is {HIGH_WATER_MARK} messages behind; try again later."
            raise Overloaded(behind) from None


class Receiver(Generic[T]):
    """The receiving end, blocking. Owned by one thread. `kind` is the struct or union of structs expected."""

    def __init__(self, address: str, kind: Any) -> None:
        self._context = zmq.Context()
        self._socket = bind(self._context, address)
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)
        self._wake_reader, self._wake_writer = os.pipe()
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_reader, zmq.POLLIN)

    def receive(self, timeout_s: float | None = None) -> T | None:
        """The next message, or None after `timeout_s` or an interrupt. Raises BadFrame."""
        ready = dict(self._poller.poll(None if timeout_s is None else int(timeout_s * 1000)))
        if self._wake_reader in ready:
            os.read(self._wake_reader, 1)
            return None
        return decode(self._decoder, self._socket.recv()) if ready else None

    def interrupt(self) -> None:
        """Make the running or the next `receive` return None. From any thread, before `close`."""
        os.write(self._wake_writer, b"\0")

    def close(self) -> None:
        """Close at once; what was not received is lost."""
        self._socket.close(linger=0)
        self._context.term()
        os.close(self._wake_reader)
        os.close(self._wake_writer)


class AsyncReceiver(Generic[T]):
    """The receiving end on an asyncio loop."""

    def __init__(self, address: str, kind: Any) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = bind(self._context, address)
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)

    async def receive(self) -> T:
        """The next message. Raises BadFrame."""
        frame: bytes = await asyncio.ensure_future(self._socket.recv())
        return decode(self._decoder, frame)

    def close(self) -> None:
        """Close at once; what was not received is lost."""
        self._socket.close(linger=0)
        self._context.term()


def decode(decoder: msgspec.msgpack.Decoder[T], frame: bytes) -> T:
    """Decode one frame; every failure is a BadFrame."""
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadFrame(f"A frame of {len(frame)} bytes is not a known message: {error}") from error


def _remove_if_left(folder: Path) -> None:
    """Remove a mailbox of this user, if nobody holds its lock. Anybody may have put anything there."""
    with suppress(OSError):  # of somebody else, no mailbox, held, or just gone
        if not (stat.S_ISDIR(folder.lstat().st_mode) and is_private(folder.lstat())):
            return
        file = os.open(folder / _LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if _is_old_lock(file):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(file)


def _is_old_lock(file: int) -> bool:
    state = os.fstat(file)
    is_lock = stat.S_ISREG(state.st_mode) and is_private(state) and os.read(file, len(_MARK)) == _MARK
    return is_lock and time.time() - state.st_mtime > _SETTLED_S


def connect(context: Any, address: str) -> Any:
    """Return the sending end of a pipe."""
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.connect(address)
    return socket


def bind(context: Any, address: str) -> Any:
    """Return the receiving end of a pipe."""
    socket = context.socket(zmq.PULL)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.bind(address)
    return socket
