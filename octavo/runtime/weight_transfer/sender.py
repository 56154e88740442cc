"""`WeightSender`: a trainer's side of an update of weights. It imports torch and nothing of an engine.

sender = WeightSender("http://127.0.0.1:8000", master_address="127.0.0.1", master_port=29600, world_size=2)
sender.send(model.state_dict(), weight_version="step 700")
"""

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal

import torch
from torch import Tensor

from octavo.base.errors import OctavoError
from octavo.runtime.weight_transfer import wire
from octavo.runtime.weight_transfer.shared_memory import SharedBuffer


class HTTPClient:
    """The verbs of a server, as calls; vLLM's names."""

    def __init__(self, url: str, api_key: str = "", timeout_s: float = wire.TIMEOUT_S) -> None:
        """api_key: an operator's"""
        self._url, self._timeout_s = url.rstrip("/"), timeout_s
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def init_weight_transfer_engine(self, request: dict[str, Any]) -> None:
        """Have the ranks meet the trainer."""
        self._post("init_weight_transfer_engine", request)

    def start_weight_update(self) -> None:
        """Begin."""
        self._post("start_weight_update", {})

    def update_weights(self, request: dict[str, Any]) -> None:
        """Have the ranks take some tensors."""
        self._post("update_weights", request)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Have the ranks compute with them."""
        self._post("finish_weight_update", {"weight_version": weight_version})

    def _post(self, path: str, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        request = urllib.request.Request(f"{self._url}/{path}", content, self._headers)
        try:
            urllib.request.urlopen(request, timeout=self._timeout_s).close()
        except urllib.error.HTTPError as error:
            raise OctavoError(f"{path}: {error.read().decode(errors='replace')[:1000]}") from error
        except OSError as error:
            raise OctavoError(f"{path}: {self._url} does not answer: {error}") from error


class WeightSender:
    """Sends a model's tensors to an engine, as often as the trainer wants. Used by one thread."""

    def __init__(
        self,
        engine: Any,
        backend: Literal["nccl", "ipc"] = "nccl",
        *,
        master_address: str = "127.0.0.1",
        master_port: int = 29600,
        world_size: int = 2,
        device: str | torch.device = "cpu",
        buffer_bytes: int = wire.BUFFER_BYTES,
        api_key: str = "",
    ) -> None:
        """Meet the ranks. Raises OctavoError.

        engine: a server's address; or an LLM, whose weight_transfer_config names the same backend
        master_address, master_port: where the ranks find this process (nccl)
        world_size: this process and all ranks of the engine (nccl)
        device: where the tensors are
        buffer_bytes: tensors travel together until they are more than that
        """
        self._engine = HTTPClient(engine, api_key) if isinstance(engine, str) else engine
        self._device, self._buffer_bytes = torch.device(device), buffer_bytes
        self._group: wire.TransferGroup | None = None
        self._thread = ThreadPoolExecutor(1, "weight-sender")
        info: dict[str, Any] = {"packed": True, "packed_buffer_size_bytes": buffer_bytes}
        if backend == "ipc":
            self._engine.init_weight_transfer_engine({"init_info": info})
            return
        info |= {"master_address": master_address, "master_port": master_port, "rank_offset": 1}
        asked = {"init_info": info | {"world_size": world_size}}
        answer = self._thread.submit(self._engine.init_weight_transfer_engine, asked)
        self._group = wire.TransferGroup(master_address, master_port, world_size, self._device)
        answer.result()

    def send(self, tensors: Mapping[str, Tensor], weight_version: str | None = None) -> None:
        """Send all tensors of a checkpoint, by the names in its files; the engine then computes with them.

        Raises OctavoError with the engine's reason; it goes on with what it had.
        """
        self._engine.start_weight_update()
        tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        if self._group is None:
            self._share(tensors)
        else:
            self._broadcast(self._group, tensors)
        self._engine.finish_weight_update(weight_version)

    def close(self) -> None:
        """Leave the ranks."""
        self._thread.shutdown()
        self._group = None

    def _broadcast(self, group: wire.TransferGroup, tensors: Mapping[str, Tensor]) -> None:
        info = wire.describe(tensors)
        answer = self._thread.submit(self._engine.update_weights, {"update_info": info})
        try:
            for metas in wire.buffers(wire.read_description(info), self._buffer_bytes):
                buffer = wire.empty_buffer(metas, self._device)
                for meta, place in wire.views(buffer, metas):
                    place.copy_(tensors[meta.name])
                group.broadcast(buffer, _failed(answer))
        except OctavoError:
            if _failed(answer)():
                answer.result()  # the engine's reason says more
            raise
        answer.result()

    def _share(self, tensors: Mapping[str, Tensor]) -> None:
        for metas in wire.buffers(wire.read_description(wire.describe(tensors)), self._buffer_bytes):
            buffer = SharedBuffer(sum(meta.num_bytes for meta in metas), self._device)
            try:
                for meta, place in wire.views(buffer.data, metas):
                    place.copy_(tensors[meta.name])
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)
                part = wire.describe({meta.name: tensors[meta.name] for meta in metas})
                self._engine.update_weights({"update_info": part | {"ipc_handles": buffer.handles}})
            finally:
                buffer.close()


def _failed(answer: "Future[None]") -> Callable[[], bool]:
    """Return what asks whether a call has ended with an error."""
    return lambda: answer.done() and answer.exception() is not None
