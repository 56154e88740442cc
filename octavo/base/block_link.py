"""`BlockServer` and `BlockClient`: blocks of keys and values from one engine to another over TCP.

The engine that has computed a prompt serves its `BlockFiles`; the one that goes on asks for them by content,
or is given them as soon as they are written (`BlockPusher`).
Both know a shared key, as the nodes of one engine do (`link`). Engines of another kind get nothing.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import msgspec
import zmq

from octavo.base.block_files import BlockFiles, BlockName
from octavo.base.errors import ConfigError, OctavoError
from octavo.base.link import Place, Unreachable
from octavo.base.log import get_logger

logger = get_logger(__name__)

_PAUSE_S = 0.01
_WRITTEN_S = 60.0
"""Within this time the step that fills a block ends, and the block is written."""


class NoBlocks(OctavoError):
    """The other engine does not answer, or is of another kind."""


class _Ask(msgspec.Struct, array_like=True, tag="blocks"):
    """Send these blocks, up to the first that is not there."""

    fingerprint: bytes
    names: list[BlockName]
    num_bytes: int
    """Of each."""


class _Give(msgspec.Struct, array_like=True, tag="take"):
    """Keep this block, whose content is the next frame."""

    fingerprint: bytes
    name: BlockName


class BlockServer:
    """Answers on a thread of its own, until `close`."""

    def __init__(self, place: Place, files: BlockFiles, fingerprint: bytes, *, takes: bool = False) -> None:
        """Listen; `takes` blocks too. Raises ConfigError when address or port cannot be used."""
        self._files, self._fingerprint, self._takes = files, fingerprint, takes
        self._decoder = msgspec.msgpack.Decoder(_Ask | _Give)
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
            self._socket.send_multipart([name, *self._answer(*frames)], copy=False)
        self._context.destroy(linger=0)

    def _answer(self, frame: bytes = b"", content: bytes = b"", *_: bytes) -> list[bytes]:
        try:
            ask = self._decoder.decode(frame)
        except msgspec.MsgspecError:
            return [b"this is no question"]
        if ask.fingerprint != self._fingerprint:
            return [b"its model, options or version differ"]
        if isinstance(ask, _Give):
            return [b"" if self._takes and self._files.write(ask.name, content) else b"it takes no blocks"]
        contents = []
        for name in ask.names:
            if (found := self._files.read(name, ask.num_bytes)) is None:
                break
            contents.append(found)
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
            contents = self._talk([msgspec.msgpack.encode(ask)], patience_s)
            if any(len(content) != num_bytes for content in contents):
                raise NoBlocks(f"{self._place} sends blocks of another size")
            if contents:
                found += contents
                until_s = time.monotonic() + patience_s
            else:
                time.sleep(_PAUSE_S)
        return found

    def write(self, name: BlockName, content: bytes, patience_s: float) -> None:
        """Give the engine a block. Raises NoBlocks when it does not take it, or is not there."""
        self._talk([msgspec.msgpack.encode(_Give(self._fingerprint, name)), content], patience_s)

    def _talk(self, frames: list[bytes], patience_s: float) -> list[bytes]:
        self._socket.send_multipart(frames)
        if not self._socket.poll(int(patience_s * 1000)):
            raise NoBlocks(f"{self._place} has not answered for {patience_s:g} s")
        frames = self._socket.recv_multipart()
        if frames[0]:
            raise NoBlocks(f"{self._place} objects: {frames[0].decode(errors='replace')}")
        return frames[1:]

    def close(self) -> None:
        """Leave the other engine."""
        self._context.destroy(linger=0)


class BlockPusher:
    """Gives blocks to the engines that will go on, once they are written; on a thread of its own."""

    def __init__(
        self, files: BlockFiles, num_bytes: int, patience_s: float, connect: Callable[[str, int], BlockClient]
    ) -> None:
        self._files, self._num_bytes, self._patience_s, self._connect = files, num_bytes, patience_s, connect
        self._queue: SimpleQueue[tuple[tuple[str, int], BlockName] | None] = SimpleQueue()
        self._clients: dict[tuple[str, int], BlockClient] = {}
        self._given_up: dict[tuple[str, int], float] = {}
        """Engines that took nothing, and until when they are left alone."""
        self._thread: threading.Thread | None = None

    def push(self, host: str, port: int, name: BlockName) -> None:
        """Give a block that is being written to the engine there, in turn."""
        self._queue.put(((host, port), name))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="block-pusher", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Give what waits, within seconds."""
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(self._patience_s)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            target, name = item
            if time.monotonic() < self._given_up.get(target, 0.0):
                continue
            try:
                self._give(target, name)
            except (NoBlocks, Unreachable) as error:
                self._given_up[target] = time.monotonic() + self._patience_s
                if (client := self._clients.pop(target, None)) is not None:
                    client.close()
                logger.warning("Blocks are not passed on: %s.", error)
        for client in self._clients.values():
            client.close()

    def _give(self, target: tuple[str, int], name: BlockName) -> None:
        until_s = time.monotonic() + _WRITTEN_S
        while (content := self._files.read(name, self._num_bytes)) is None:
            if time.monotonic() > until_s:
                raise NoBlocks("they are not written")
            time.sleep(_PAUSE_S)
        client = self._clients.get(target)
        if client is None:
            client = self._clients[target] = self._connect(*target)
        client.write(name, content, self._patience_s)
