"""`WeightReceiver`: takes a trainer's weights on one rank, beside those in use, until an update is finished.

A thread loads them as if they were read from files; what they replace is in use until all ranks have
everything. A rank that cannot use a tensor goes on receiving, because the others and the trainer are in the
same broadcasts, and says what was wrong at the end of the call. Verbs begin and return at once; `state` says
when they are done. The verbs are vLLM's.
"""

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from octavo.base.errors import OctavoError, RequestError, Unsupported
from octavo.config.engine import EngineConfig
from octavo.config.weight_transfer import WeightTransferConfig, weight_transfer
from octavo.runtime.loader.loader import Reader
from octavo.runtime.loader.safetensors import to_pieces
from octavo.runtime.weight_transfer import wire
from octavo.runtime.weight_transfer.shared_memory import open_shared

_WAITS = "start_weight_update comes before this."
Receive = Callable[[dict[str, Any]], Iterator[tuple[wire.TensorMeta, Tensor]]]
Loaded = Any
"""Whatever loading the model returns."""
Stage = Callable[[EngineConfig, Loaded, str], None]
"""Takes what is loaded, and the path of its files or ""."""


class WeightReceiver:
    """The verbs of a rank."""

    def __init__(
        self,
        device: torch.device,
        load: Callable[[EngineConfig, Reader], Loaded],
        stage: Stage,
        *,
        keeps: bool,
    ) -> None:
        """load: makes a model of what the reader brings; stage: takes it; keeps: this rank writes files"""
        self._device, self._load, self._stage, self._keeps = device, load, stage, keeps
        self._group: wire.TransferGroup | None = None
        self._buffer_bytes = wire.BUFFER_BYTES
        self._task: threading.Thread | None = None
        """What runs, or ran last."""
        self._error = ""
        self._update: _Update | None = None
        self._kept: Path | None = None
        self.commands: dict[str, Callable[..., Any]] = {
            "init_weight_transfer_engine": self.init,
            "shutdown_weight_transfer_engine": self.close,
            "update_weights": self.update,
            "finish_weight_update": self.finish,
            "weight_transfer_state": self.state,
        }

    def init(self, init_info: dict[str, Any], config: EngineConfig) -> None:
        """Begin to meet the trainer (nccl), and note how large buffers are."""
        self._way = _way(config)
        packed = init_info.get("packed", True)
        size = init_info.get("packed_buffer_size_bytes", wire.BUFFER_BYTES)
        if not isinstance(size, int) or size < 1:
            raise RequestError(f"packed_buffer_size_bytes must be above 0, got {size!r}.", "init_info")
        self._buffer_bytes = size if packed else 0
        if self._way.backend == "ipc":
            return
        address, *numbers = (
            init_info.get(key) for key in ("master_address", "master_port", "world_size", "rank_offset")
        )
        if not isinstance(address, str) or not all(type(number) is int for number in numbers):
            raise RequestError(
                "init_info needs master_address, master_port, world_size and rank_offset: the trainer's "
                "address, how many ranks meet there, and how many come before the engine's.",
                "init_info",
            )
        self._run(lambda: self._meet(address, *numbers))  # type: ignore[arg-type]  # they are numbers

    def start(self, config: EngineConfig) -> None:
        """Begin an update; one that was not finished is dropped."""
        way = _way(config)
        self.drop()
        if way.backend == "nccl" and self._group is None:
            raise RequestError("init_weight_transfer_engine comes before an update of weights.")
        folder = None
        if way.keep_in is not None and self._keeps:
            folder = _new_folder(way.keep_in, Path(config.checkpoint.path))
        receive = self._receive_ipc if way.backend == "ipc" else self._receive
        self._update = update = _Update(receive, folder, config)
        self._run(lambda: update.run(self._load, self._stage))

    def update(self, update_info: dict[str, Any]) -> None:
        """Begin to receive the tensors of one description."""
        metas = wire.read_description(update_info)
        self._ongoing().take({**update_info, "metas": metas})

    def finish(self) -> None:
        """Nothing more comes."""
        self._ongoing().end()

    def state(self) -> str | None:
        """Return "", or why what was begun has failed; None while it goes on."""
        update, is_running = self._update, self._task is not None and self._task.is_alive()
        if is_running and (update is None or not update.is_idle):
            return None
        return self._error or (update.error if update else "")

    def drop(self) -> None:
        """Forget an update that is not finished."""
        if (update := self._update) is not None:
            self._update = None
            update.end()
            if self._task is not None:
                self._task.join()
            if update.folder is not None and not update.is_used:
                shutil.rmtree(update.folder, ignore_errors=True)

    def note_use(self) -> None:
        """The weights of the update are in use: those kept before are needless."""
        update, self._update = self._update, None
        if update is not None and update.folder is not None:
            update.is_used = True
            if self._kept is not None:
                shutil.rmtree(self._kept, ignore_errors=True)
            self._kept = update.folder

    def close(self) -> None:
        """Leave the trainer."""
        self.drop()
        self._group = None

    def _ongoing(self) -> "_Update":
        if self._update is None:
            raise RequestError(_WAITS)
        return self._update

    def _run(self, work: Callable[[], None]) -> None:
        self._error = ""

        def task() -> None:
            try:
                if self._device.type == "cuda":
                    torch.cuda.set_device(self._device)
                work()
            except OctavoError as error:
                self._error = str(error)
            except Exception as error:  # of torch's, which a tensor from outside has caused
                self._error = f"{type(error).__name__}: {error}"

        self._task = threading.Thread(target=task, name="weight-transfer", daemon=True)
        self._task.start()

    def _meet(self, address: str, port: int, world_size: int, rank_offset: int) -> None:
        self._group = wire.TransferGroup(address, port, world_size, self._device, rank_offset)

    def _receive(self, update_info: dict[str, Any]) -> Iterator[tuple[wire.TensorMeta, Tensor]]:
        assert self._group is not None
        for metas in wire.buffers(update_info["metas"], self._buffer_bytes):
            buffer = wire.empty_buffer(metas, self._device)
            self._group.broadcast(buffer)
            yield from wire.views(buffer, metas)

    def _receive_ipc(self, update_info: dict[str, Any]) -> Iterator[tuple[wire.TensorMeta, Tensor]]:
        metas = update_info["metas"]
        size = sum(meta.num_bytes for meta in metas)
        yield from wire.views(open_shared(update_info.get("ipc_handles"), size, self._device), metas)


class _Update:
    """The tensors of one update, as they come; iterated by the thread that loads them."""

    def __init__(self, receive: Receive, folder: Path | None, config: EngineConfig) -> None:
        self.folder, self.is_used, self.error = folder, False, ""
        self._receive, self._config = receive, config
        self._orders: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._num_given = self._num_done = 0
        self._tensors = self._all()

    @property
    def is_idle(self) -> bool:
        """Return True if all that was announced has come, and more may."""
        return self._num_done == self._num_given

    def take(self, update_info: dict[str, Any]) -> None:
        self._num_given += 1
        self._orders.put(update_info)

    def end(self) -> None:
        self._num_given += 1
        self._orders.put(None)

    def run(self, load: Callable[[EngineConfig, Reader], Loaded], stage: Stage) -> None:
        """Load what comes until the end. Raises what is wrong with it."""
        try:
            made = load(self._config, lambda config, model, arch: to_pieces(self, config, model, arch))
            stage(self._config, made, str(self.folder or ""))
        except Exception as error:
            self.error = str(error) or type(error).__name__
            for _ in self:
                pass  # see above
            raise

    def __iter__(self) -> "_Update":
        return self

    def __next__(self) -> tuple[str, str, Tensor]:
        return next(self._tensors)

    def _all(self) -> Iterator[tuple[str, str, Tensor]]:
        is_packed = bool(self._config.model.quantization)
        while (update_info := self._orders.get()) is not None:
            kept: dict[str, Tensor] = {}
            for meta, received in self._receive(update_info):
                tensor = received.cpu() if is_packed else received
                if self.folder is not None and not self.error:
                    kept[meta.name] = tensor.cpu().clone()
                yield f"tensor {meta.name!r} of the trainer", meta.name, tensor
            if self.folder is not None and kept:
                save_file(kept, self.folder / f"part-{self._num_done:05}.safetensors", {"format": "pt"})
            self._num_done += 1


def _way(config: EngineConfig) -> WeightTransferConfig:
    """Return what the option asks for. Raises Unsupported where there is nothing to send to."""
    way = weight_transfer(config.model.weight_transfer_config)
    if way is None:
        raise Unsupported(
            "Weight transfer not configured. Please set weight_transfer_config to enable weight transfer, "
            """as in --weight-transfer-config '{"backend": "nccl"}'."""
        )
    if config.model.load_format == "gguf" or config.pooling is not None:
        raise Unsupported("Weights are sent to models that generate text and come from safetensors files.")
    return way


def _new_folder(place: Path, original: Path) -> Path:
    for number in range(1_000_000):
        folder = place / f"{os.getpid()}-{number}"
        try:
            folder.mkdir(mode=0o700, parents=True)
        except FileExistsError:
            continue
        for file in original.iterdir():
            if file.suffix != ".safetensors" and not file.name.endswith(".index.json"):
                with suppress(OSError):
                    (folder / file.name).symlink_to(file.resolve())
        return folder
    raise OctavoError(f"{place} is full.")
