"""`SharedTier`: contents on their way from a folder that engines share, or from another engine, into blocks.

Owned by the KV cache manager. `fetch` reads files beside the loop, on the thread that prepares requests;
the loop takes in what has come (`take_in`) and finds it by its key like what is in host memory. A content
that is brought into a block goes down with the step; the worker of each rank writes its part. What nobody
asks for gives way to later ones.

Between engines that share no folder each has one of its own and serves it (`BlockServer`).
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from octavo.base import env
from octavo.base.block_files import BlockFiles, BlockName
from octavo.base.block_link import BlockClient, BlockPusher, BlockServer, NoBlocks
from octavo.base.errors import RequestError
from octavo.base.link import Place, Unreachable
from octavo.base.log import get_logger
from octavo.base.lru import LRU
from octavo.engine.kvcache.block_pool import BlockKey
from octavo.messages.kv import CachePlan, StorePlan
from octavo.messages.request import EngineRequest, KVSource
from octavo.messages.step import BlockSave

MAX_HELD_BYTES = 1 << 30
"""Of contents that were read and are not in blocks yet; as much again may be on its way from the reader."""
_MAX_KNOWN = 1 << 16
_BATCH_BYTES = 16 << 20
"""Asked for at once."""
_PATIENCE_S = 3.0
"""With an engine that says nothing, or has not written a block yet."""
_PUSH_PAUSE_S = 0.2
"""Longest between two blocks that another engine pushes, or it has ended or given up."""
_LOOK_S = 0.002

logger = get_logger(__name__)

Pull = Callable[[list[BlockKey]], None]
Content = list[bytes]
"""One block's keys and values, by rank."""


class SharedTier:
    """Files below, blocks above. Without a store in the plan it is empty and stays so."""

    def __init__(self, plan: CachePlan) -> None:
        store = plan.store
        self._files = BlockFiles(store.folder, store.fingerprint, store.max_bytes) if store else None
        self._num_ranks = store.num_ranks if store else 0
        self._block_bytes = plan.bytes_per_block
        self._max_held = MAX_HELD_BYTES // (self._block_bytes * self._num_ranks) if store else 0
        self.reads, self.writes = (store.reads, store.writes) if store else (False, False)
        self._came: deque[tuple[BlockKey, Content]] = deque()
        self._coming: set[BlockKey] = set()
        self._numbers: dict[BlockKey, int] = {}
        self._held: dict[int, tuple[BlockKey, Content]] = {}
        self._next_number = 0
        self._leaving: dict[int, Content] = {}
        self._saved: LRU[BlockKey, bool] = LRU(_MAX_KNOWN)
        self._store = store
        self._clients: dict[tuple[str, int], BlockClient] = {}
        self._unloaded: dict[str, str] = {}
        """Why the blocks of a request have not come, where it may not be computed instead."""
        self._server = (
            BlockServer(_place(store, store), self._files, store.fingerprint, takes=store.reads)
            if (store and self._files and store.port)
            else None
        )
        self._pusher = (
            BlockPusher(self._files, self._block_bytes, _PATIENCE_S, self._connect) if self._files else None
        )

    def has_files(self, key: BlockKey) -> bool:
        """Return True if all ranks' files are there. On any thread."""
        files = self._files
        return files is not None and all(files.has(name) for name in self._names(key))

    def fetch(self, keys: Iterable[BlockKey]) -> None:
        """Read contents, until one is missing or too much is held. On any thread, one at a time."""
        assert self._files is not None
        for key in keys:
            if key in self._coming:
                continue
            if len(self._came) >= self._max_held:
                return
            content = [self._files.read(name, self._block_bytes) for name in self._names(key)]
            parts = [part for part in content if part is not None]
            if len(parts) < len(content):
                return
            self._coming.add(key)
            self._came.append((key, parts))

    def puller(self, request: EngineRequest) -> Pull | None:
        """Return what gets contents for a request whose prompt another engine has computed."""
        source = request.sharing.source
        return None if source is None else partial(self._pull, request.request_id, source)

    def _pull(self, request_id: str, source: KVSource, keys: list[BlockKey]) -> None:
        """Get contents from the engine that has computed this prompt. On any thread, one at a time."""
        store = self._store
        assert store is not None
        missing = self._fetch_pushed(keys)
        count = max(1, _BATCH_BYTES // (self._block_bytes * self._num_ranks))
        try:
            for start in range(0, len(missing), count):
                batch = missing[start : start + count]
                names = [name for key in batch for name in self._names(key)]
                parts = self._client(source).read(names, self._block_bytes, _PATIENCE_S)
                for i in range(len(parts) // self._num_ranks):
                    self._coming.add(batch[i])
                    self._came.append((batch[i], parts[i * self._num_ranks : (i + 1) * self._num_ranks]))
                if len(parts) < len(names):
                    raise NoBlocks(f"{source.host}:{source.port} has not all blocks of the prompt")
        except (NoBlocks, Unreachable) as error:
            if (client := self._clients.pop((source.host, source.port), None)) is not None:
                client.close()
            logger.warning("The prompt of %s is not taken over: %s.", request_id, error)
            if not store.may_recompute:
                self._unloaded[request_id] = str(error)

    def _fetch_pushed(self, keys: list[BlockKey]) -> list[BlockKey]:
        """Read contents that were pushed here, as long as further ones come; return those that did not."""
        until_s, missing = 0.0, keys
        while True:
            self.fetch(missing)
            num_before = len(missing)
            missing = [key for key in missing if key not in self._coming and self.find(key) is None]
            if len(missing) < num_before:
                until_s = time.monotonic() + _PUSH_PAUSE_S
            if not missing or time.monotonic() >= until_s:
                return missing
            time.sleep(_LOOK_S)

    def check(self, request_id: str) -> None:
        """Raise RequestError if what the request was to take over has not come and may not be computed."""
        if self._unloaded and (reason := self._unloaded.pop(request_id, "")):
            raise RequestError(f"Keys and values of the prompt could not be loaded: {reason}.")

    def source_of(self, request_id: str, num_blocks: int) -> KVSource | None:
        """Return where another engine finds the blocks of a request that was computed here."""
        store = self._store
        if self._server is None or store is None or not store.writes:
            return None
        return KVSource(store.host, store.port, store.engine_id, request_id, num_blocks, self._num_ranks)

    def close(self) -> None:
        """Serve no more, and give no more."""
        if self._pusher is not None:
            self._pusher.close()
        if self._server is not None:
            self._server.close()
            self._server = None
        while self._clients:
            self._clients.popitem()[1].close()

    def take_in(self) -> None:
        """Make what has been read findable."""
        while self._came:
            key, content = self._came.popleft()
            self._coming.discard(key)
            if key not in self._numbers:
                self._numbers[key] = self._next_number
                self._held[self._next_number] = key, content
                self._next_number += 1
        while len(self._held) > self._max_held:
            self._drop(next(iter(self._held)))

    def find(self, key: BlockKey) -> int | None:
        """Return the number of a content that is held."""
        return self._numbers.get(key)

    def pin(self, number: int) -> BlockKey:
        """Return the content of this number, about to be brought into a block; it stays until `unpin`."""
        return self._held[number][0]

    def unpin(self, number: int) -> None:
        """Let it go down with the step that is being planned."""
        self._leaving[number] = self._held[number][1]
        self._drop(number)

    def take_leaving(self) -> dict[int, Content]:
        """Hand over what goes down with the step being planned, by number."""
        leaving, self._leaving = self._leaving, {}
        return leaving

    def saves(self, blocks: Iterable[tuple[int, BlockKey]], target: KVSource | None) -> list[BlockSave]:
        """Those of (block, content) that are not in the files, as far as known; they count as saved.

        target: an engine that gets them all
        """
        saves = []
        for block, key in blocks:
            if self._pusher is not None and target is not None and target.port:
                for name in self._names(key):
                    self._pusher.push(target.host, target.port, name)
            if self._saved.get(key) is None:
                self._saved.put(key, True, 1)
                saves.append(BlockSave(block, *key))
        return saves

    def clear(self) -> None:
        """Hold nothing of what was taken in; the files stay."""
        self._numbers.clear()
        self._held.clear()

    def clear_files(self) -> None:
        """Remove the files of this kind; what is computed from now on is saved again."""
        assert self._files is not None
        self._files.clear()
        self._saved.clear()

    def _client(self, source: KVSource) -> BlockClient:
        found = self._clients.get((source.host, source.port))
        if found is None:
            found = self._clients[source.host, source.port] = self._connect(source.host, source.port)
        return found

    def _connect(self, host: str, port: int) -> BlockClient:
        assert self._store is not None
        return BlockClient(_place(KVSource(host, port), self._store).resolved(), self._store.fingerprint)

    def _drop(self, number: int) -> None:
        key, _ = self._held.pop(number)
        del self._numbers[key]

    def _names(self, key: BlockKey) -> list[BlockName]:
        return [BlockName(*key, rank) for rank in range(self._num_ranks)]


def _place(at: StorePlan | KVSource, store: StorePlan) -> Place:
    return Place(at.host, at.port, env.node_key(), store.silence_s)
