"""`Hub` and `Spoke` carry frames between the machines of one engine: TCP, encrypted by a key both know.

The engine core on node 0 has the hub; a node that joins has a spoke. Local pipes (`transport`) end in them:
to ranks and executor it makes no difference which machine a rank is on.

CURVE (ZeroMQ's encryption, Curve25519) needs the hub's public key before a peer says anything. Both ends make
the hub's keys from the shared one: without it nobody can connect, pose as the hub, read or change a frame.
Ends that hear nothing from each other for `silence_s` are lost to each other, whatever they are doing:
ZeroMQ's own thread sends the heartbeats. A shorter break is TCP's to mend, and nothing is lost.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import psutil
import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from octavo.base.errors import ConfigError
from octavo.base.transport import HIGH_WATER_MARK, bind, connect

_BEATS = 4
"""Heartbeats within the longest silence."""
_REFUSALS = 3
"""Handshakes that fail before the key is held to be wrong."""
_LINGER_MS = 1000
_HANDSHAKE_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


class Unreachable(ConfigError):
    """The hub's address is not known, or no way leads there."""


@dataclass(frozen=True)
class Place:
    """Where the hub is, and what it takes to reach it."""

    host: str
    port: int
    key: str
    silence_s: float

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"

    def resolved(self) -> "Place":
        """Return the same with the host's address. Raises Unreachable."""
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise Unreachable(f"{self.host!r} is no address that can be found: {error}.") from None
        return Place(str(found[0][4][0]), self.port, self.key, self.silence_s)

    def own_address(self) -> str:
        """Return the address of this machine that leads to the hub. Raises Unreachable."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((self.host, self.port))  # sends nothing
            except OSError as error:
                raise Unreachable(f"There is no way to {self.host}: {error}.") from None
            return str(probe.getsockname()[0])

    def own_interface(self) -> str:
        """Return the name of the network interface that leads to the hub. Raises Unreachable."""
        own = self.own_address()
        for name, addresses in psutil.net_if_addrs().items():
            if any(address.address.partition("%")[0] == own for address in addresses):
                return str(name)
        return "lo"  # 127.0.0.2 and the like belong to it without being listed

    def server(self, context: Any) -> Any:
        """Return the socket of the hub's end, not bound yet."""
        made = self._socket(context, zmq.ROUTER)
        made.curve_secretkey = self.secret
        made.curve_server = True
        return made

    def client(self, context: Any) -> Any:
        """Return a socket of the other end, not connected yet."""
        made = self._socket(context, zmq.DEALER)
        made.curve_serverkey = zmq.curve_public(self.secret)
        made.curve_publickey, made.curve_secretkey = zmq.curve_keypair()
        return made

    def _socket(self, context: Any, kind: int) -> Any:
        """Return a socket that beats, without keys."""
        made = context.socket(kind)
        made.setsockopt(zmq.IPV6, 1)
        made.setsockopt(zmq.LINGER, _LINGER_MS)
        made.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        made.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        silence_ms = int(self.silence_s * 1000)
        made.setsockopt(zmq.HEARTBEAT_IVL, max(1, silence_ms // _BEATS))
        made.setsockopt(zmq.HEARTBEAT_TIMEOUT, silence_ms)
        return made

    @property
    def secret(self) -> bytes:
        """Return the hub's secret key."""
        return bytes(z85.encode(sha256(b"octavo hub\0" + self.key.encode()).digest()))


class Hub:
    """Joins peers, by number, with local pipes: a thread of its own carries frames both ways.

    What comes to `pipes[n]` goes to peer n, and what peers send goes to the pipe `replies`. `admit` judges
    the first frame of a peer, on that thread: it returns the answer, and the peer's number if it may stay.
    `on_loss` gets the number of a peer that was admitted and is gone.
    """

    def __init__(
        self,
        place: Place,
        pipes: Mapping[int, str],
        replies: str,
        admit: Callable[[bytes], tuple[bytes, int | None]],
        on_loss: Callable[[int], None],
    ) -> None:
        """Listen at `place`. Raises ConfigError when that is not possible."""
        self._admit, self._on_loss = admit, on_loss
        self._names: dict[int, bytes] = {}
        self._numbers: dict[bytes, int] = {}
        self._connections: dict[int, int] = {}
        """The numbers of peers by file descriptor."""
        self._context = zmq.Context()
        self._peers = place.server(self._context)
        self._events = self._peers.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            self._peers.bind(str(place))
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"Node 0 cannot listen at {place.host}:{place.port}: {error}. master_addr must be an address "
                "of this machine, and master_port a free port."
            ) from None
        self._pipes = {bind(self._context, address): number for number, address in pipes.items()}
        self._replies = connect(self._context, replies)
        self._wake_reader, self._wake_writer = os.pipe()
        self._thread = threading.Thread(target=self._run, name="node-hub", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send what has come, then leave all peers."""
        os.write(self._wake_writer, b"\0")
        self._thread.join()
        os.close(self._wake_reader)
        os.close(self._wake_writer)

    def _run(self) -> None:
        poller = zmq.Poller()
        for each in (self._peers, self._events, self._wake_reader, *self._pipes):
            poller.register(each, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            for pipe, number in self._pipes.items():
                if pipe in ready and number in self._names:
                    self._peers.send_multipart([self._names[number], pipe.recv()])
            if self._peers in ready:
                self._take()
            if self._events in ready:
                self._note(parse_monitor_message(self._events.recv_multipart())["value"])
            if self._wake_reader in ready:
                break
        self._peers.disable_monitor()
        self._context.destroy(linger=_LINGER_MS)

    def _take(self) -> None:
        name, frame = self._peers.recv_multipart(copy=False)[:2]
        if name.bytes in self._numbers:
            self._replies.send(frame)
            return
        answer, number = self._admit(frame.bytes)
        if number is not None:
            self._names[number], self._numbers[name.bytes] = name.bytes, number
            self._connections[int(frame.get(zmq.SRCFD))] = number
        self._peers.send_multipart([name.bytes, answer])

    def _note(self, connection: int) -> None:
        """A connection has ended: by its peer's end, or by silence."""
        if (number := self._connections.pop(connection, None)) is not None:
            self._numbers.pop(self._names.pop(number))
            self._on_loss(number)


class Spoke:
    """A connection to the hub. Owned by one thread."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._context = zmq.Context()
        self._hub = place.client(self._context)
        self._events = self._hub.get_monitor_socket(zmq.EVENT_DISCONNECTED | _HANDSHAKE_FAILED)
        self._hub.connect(str(place))

    def send(self, frame: bytes) -> None:
        """Send a frame, at once or when the hub is there."""
        self._hub.send(frame)

    def receive(self, timeout_s: float) -> bytes | None:
        """Return the hub's next frame; None if there was none in time, or the hub went away.

        Raises ConfigError when the hub does not know the key.
        """
        deadline_s, num_refusals, was_refused = time.monotonic() + timeout_s, 0, False
        while (left_s := deadline_s - time.monotonic()) > 0:
            ready = self._wait(left_s)
            if self._hub in ready:
                return bytes(self._hub.recv())
            if self._events in ready:
                if self._event() & zmq.EVENT_DISCONNECTED:
                    if was_refused:
                        continue
                    return None
                was_refused = True
                if (num_refusals := num_refusals + 1) == _REFUSALS:
                    raise ConfigError(
                        f"Node 0 at {self._place.host}:{self._place.port} does not know this node's key: "
                        "give OCTAVO_NODE_KEY the same value on every node."
                    )
        return None

    def frames(self, replies: str) -> Iterator[bytes]:
        """Yield what the hub sends until it is lost; meanwhile send what comes to the pipe `replies`."""
        pipe = bind(self._context, replies)
        while True:
            ready = self._wait(None, pipe)
            if pipe in ready:
                self._hub.send(pipe.recv())
            if self._hub in ready:
                yield self._hub.recv()
            elif self._events in ready and self._event() & zmq.EVENT_DISCONNECTED:
                return

    def close(self) -> None:
        """Leave the hub."""
        self._hub.disable_monitor()
        self._context.destroy(linger=0)

    def _wait(self, timeout_s: float | None, *others: Any) -> dict[Any, int]:
        poller = zmq.Poller()
        for each in (self._hub, self._events, *others):
            poller.register(each, zmq.POLLIN)
        return dict(poller.poll(None if timeout_s is None else max(1, int(timeout_s * 1000))))

    def _event(self) -> int:
        return int(parse_monitor_message(self._events.recv_multipart())["event"])


def free_port(host: str) -> int:
    """Return a port of this machine that is free now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def free_address(host: str) -> str:
    """Return tcp://host:port with such a port."""
    return str(Place(host, free_port(host), "", 0.0))
