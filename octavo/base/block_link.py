"""`BlockServer` and `BlockClient`: blocks of keys and values from one engine to another over TCP.

The engine that has computed a prompt serves its `BlockFiles`; the one that goes on asks for them by content.
Both know a shared key, as the nodes of one engine do (`link`). Engines of another kind get nothing.
"""

import os
import threading
import time
from collections.abc import Sequence

import msgspec
import zmq

from octavo.base.block_files import BlockFiles, BlockName
from octavo.base.errors import ConfigError, OctavoError
from octavo.base.link import Place

_PAUSE_S = 0.01


class NoBlocks(OctavoError):
    """The other engine does not answer, or is of another kind."""


class _Ask(msgspec.Struct, array_like=True, tag="blocks"):
    """Send these blocks, up to the first that is not there."""

    fingerprint: bytes
    names: list[BlockName]
    num_bytes: int
    """Of each."""


class BlockServer:
    """Answers on a thread of its own, until `close`."""

    def __init__(self, place: Place, files: BlockFiles, fingerprint: bytes) -> None:
        """Listen. Raises ConfigError when address or port cannot be used."""
        self._files, self._fingerprint = files, fingerprint
        self._decoder = msgspec.msgpack.Decoder(_Ask)
        self._context = zmq.Context()
        self._socket = place.server(self._context)
        try:
            self._socket.bind(str(place))
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"kv_ip={place.host!r} and kv_port={place.port} cannot be listened at: {error}. They must "
                "be an address of this machine and a free port."
            ) from None
        self._wake_reader, self._wake_writer = os.pipe()
        self._thread = threading.Thread(target=self._serve, name="block-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering."""
        os.write(self._wake_writer, b"\0")
        self._thread.join()
        os.close(self._wake_reader)
        os.close(self._wake_writer)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_reader, zmq.POLLIN)
        while self._wake_reader not in dict(poller.poll()):
            name, *frames = self._socket.recv_multipart()
            self._socket.send_multipart([name, *self._answer(frames[-1] if frames else b"")], copy=False)
        self._context.destroy(linger=0)

    def _answer(self, frame: bytes) -> list[bytes]:
        try:
            ask = self._decoder.decode(frame)
        except msgspec.MsgspecError:
            return [b"this is no question"]
        if ask.fingerprint != self._fingerprint:
            return [b"its model, options or version differ"]
        contents = []
        for name in ask.names:
            if (content := self._files.read(name, ask.num_bytes)) is None:
                break
            contents.append(content)
        return [b"", *contents]


class BlockClient:
    """One engine that serves blocks; used by one thread."""

    def __init__(self, place: Place, fingerprint: bytes) -> None:
        self._place, self._fingerprint = place, fingerprint
        self._context = zmq.Context()
        self._socket = place.client(self._context)
        self._socket.connect(str(place))

    def read(self, names: Sequence[BlockName], num_bytes: int, patience_s: float) -> list[bytes]:
        """Return the contents of `num_bytes` each, up to the first that does not come.

        Those that are not written yet are waited for. Raises NoBlocks when there is no answer in time.
        """
        found: list[bytes] = []
        until_s = time.monotonic() + patience_s
        while len(found) < len(names) and time.monotonic() < until_s:
            ask = _Ask(self._fingerprint, list(names[len(found) :]), num_bytes)
            self._socket.send(msgspec.msgpack.encode(ask))
            if not self._socket.poll(int(patience_s * 1000)):
                raise NoBlocks(f"{self._place} has not answered for {patience_s:g} s")
            objection, *contents = self._socket.recv_multipart()
            if objection:
                raise NoBlocks(f"{self._place} gives nothing: {objection.decode(errors='replace')}")
            if any(len(content) != num_bytes for content in contents):
                raise NoBlocks(f"{self._place} sends blocks of another size")
            if contents:
                found += contents
                until_s = time.monotonic() + patience_s
            else:
                time.sleep(_PAUSE_S)
        return found

    def close(self) -> None:
        """Leave the other engine."""
        self._context.destroy(linger=0)
