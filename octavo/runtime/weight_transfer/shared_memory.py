"""A trainer's buffer, opened by an engine on the same machine: by CUDA's IPC, or as a mapped file.

A handle is plain data, by the GPU's UUID or "cpu". vLLM's handles are pickles, which octavo never reads.
"""

import base64
import os
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.base.errors import RequestError
from octavo.base.ownership import is_trusted

_FOLDERS = ("/dev/shm", tempfile.gettempdir())


class SharedBuffer:
    """Memory of the trainer's for others to read, on its device."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Allocate it: `data` is [num_bytes] uint8."""
        self.handles: dict[str, Any]
        self._path: str | None = None
        if device.type == "cuda":
            self.data = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            shared = self.data.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]  # as multiprocessing does
            plain = [base64.b64encode(part).decode() if isinstance(part, bytes) else part for part in shared]
            self.handles = {_uuid(device): [*plain, self.data.storage_offset()]}
            return
        folder = next(name for name in _FOLDERS if os.access(name, os.W_OK))
        file, self._path = tempfile.mkstemp(prefix="octavo-weights-", dir=folder)  # for this user alone
        os.truncate(file, num_bytes)
        os.close(file)
        self.data = torch.from_file(self._path, shared=True, size=num_bytes, dtype=torch.uint8)
        self.handles = {"cpu": self._path}

    def close(self) -> None:
        """Remove its name; the memory goes with the last who has it."""
        if self._path is not None:
            with suppress(OSError):
                Path(self._path).unlink()


def open_shared(handles: object, num_bytes: int, device: torch.device) -> Tensor:
    """Return the trainer's buffer [num_bytes] uint8. Raises RequestError."""
    if not isinstance(handles, Mapping):
        raise RequestError(
            "ipc_handles must be what WeightSender sends: an object by GPU, or by cpu.", "ipc_handles"
        )
    kind = _uuid(device) if device.type == "cuda" else "cpu"
    handle = handles.get(kind)
    if handle is None:
        raise RequestError(f"IPC handle not found for {kind}. Available: {list(handles)}.", "ipc_handles")
    return _open_file(handle, num_bytes) if device.type == "cpu" else _open_cuda(handle, num_bytes, device)


def _open_file(handle: object, num_bytes: int) -> Tensor:
    path = Path(str(handle))
    try:
        state = path.lstat()
        if not stat.S_ISREG(state.st_mode) or not is_trusted(state) or state.st_size < num_bytes:
            text = f"{path} is no file of this user's with {num_bytes} bytes."
            raise RequestError(text, "ipc_handles")
        return torch.from_file(str(path), shared=False, size=num_bytes, dtype=torch.uint8)
    except (OSError, RuntimeError) as error:
        raise RequestError(f"{path} cannot be opened: {error}", "ipc_handles") from error


def _open_cuda(handle: Any, num_bytes: int, device: torch.device) -> Tensor:
    """handle: what torch tells of a storage to another process, and the first byte there."""
    try:
        _, *shared, start = (base64.b64decode(part) if isinstance(part, str) else part for part in handle)
        storage = torch.UntypedStorage._new_shared_cuda(device.index or 0, *shared)
        whole = torch.empty(0, dtype=torch.uint8, device=device)
        return whole.set_(storage, int(start), (num_bytes,), (1,))
    except (RuntimeError, TypeError, ValueError) as error:
        raise RequestError(f"The trainer's memory cannot be opened: {error}", "ipc_handles") from error


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
