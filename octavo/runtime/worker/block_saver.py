"""A `BlockSaver` writes blocks of the KV cache into a folder that engines share, beside the steps.

Owned by the worker, which names the blocks after the step that fills them. A block is copied where it is, in
the order of the device's work; the rest happens on a thread. When the disk is slower than the prompts come,
blocks are left out: it is a cache.
"""

import threading
from queue import SimpleQueue

import torch
from torch import Tensor

from octavo.base.block_files import BlockFiles, BlockName
from octavo.base.log import get_logger
from octavo.messages.kv import StorePlan
from octavo.messages.step import BlockSave
from octavo.runtime.worker.kv_tensors import KVTensors

logger = get_logger(__name__)

_MAX_WAITING_BYTES = 256 << 20
_LAST_WRITES_S = 10.0


class BlockSaver:
    """Writes one rank's blocks."""

    def __init__(self, store: StorePlan, cache: KVTensors, rank: int) -> None:
        self._files = BlockFiles(store.folder, store.fingerprint, store.max_bytes)
        self._cache = cache
        self._rank = rank
        self._queue: SimpleQueue[tuple[BlockName, Tensor, int] | None] = SimpleQueue()
        self._num_waiting_bytes = 0
        self._lock = threading.Lock()
        """Guards the number."""
        self._num_drops = 0
        self._writing = threading.Lock()
        """Held while a block is written, and guards the number of drops."""
        self._thread = threading.Thread(target=self._write_all, name="block-saver", daemon=True)
        self._thread.start()

    def save(self, saves: list[BlockSave]) -> None:
        """Keep these blocks as they are after the work given to the device so far; waits for nothing."""
        for block, digest, group in ((save.block, save.digest, save.group) for save in saves):
            if self._num_waiting_bytes > _MAX_WAITING_BYTES:
                logger.warning("The disk is slow: not all blocks are kept for other engines.")
                return
            content = self._cache.copy_of(block)
            with self._lock:
                self._num_waiting_bytes += content.nbytes
            self._queue.put((BlockName(digest, group, self._rank), content, self._num_drops))

    def drop(self) -> None:
        """Write nothing of what waits; returns when no block is being written."""
        with self._writing:
            self._num_drops += 1

    def close(self) -> None:
        """Write what waits, within seconds."""
        self._queue.put(None)
        self._thread.join(_LAST_WRITES_S)

    def _write_all(self) -> None:
        while (item := self._queue.get()) is not None:
            name, content, num_drops = item
            with self._writing:
                if num_drops == self._num_drops:
                    self._write(name, content)
            with self._lock:
                self._num_waiting_bytes -= content.nbytes

    @torch.inference_mode()
    def _write(self, name: BlockName, content: Tensor) -> None:
        """Write a block unless it holds a NaN, which would spoil every request that shares it."""
        if not self._files.has(name) and self._cache.all_finite(content, name.group):
            self._files.write(name, content.cpu().numpy().tobytes())
