"""Weights as they lie in memory once a model is loaded, in a file per rank: `save` and `restore`.

A snapshot holds what loading made of the checkpoint: matrices joined, packed, arranged for the device.
`restore` gives it to a model that has just been built. On a CPU the file is mapped: a page is read when a
kernel needs it, and all engines of a machine share it. The index is JSON; nothing in it is run.
"""

import json
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from octavo.base.errors import BadCheckpoint, Unsupported
from octavo.base.gguf import BlockType
from octavo.base.log import get_logger
from octavo.config.engine import EngineConfig
from octavo.runtime.kernels.build import keep as keep_kernels
from octavo.runtime.kernels.experts import Stacks
from octavo.runtime.kernels.linear import Packed
from octavo.runtime.layers.build import Layer
from octavo.runtime.loader.kv_scales import read_kv_scales
from octavo.runtime.models.interface import Model
from octavo.runtime.platforms.platform import Platform
from octavo.runtime.quantization.blocks import Blocks
from octavo.runtime.quantization.method import ExpertsMethod, LinearMethod
from octavo.runtime.quantization.parameter import DenseParameter

logger = get_logger(__name__)
_ALIGNMENT = 4096
_TUPLES = {kind.__name__: kind for kind in (Packed, Stacks, Blocks, BlockType, tuple, list)}
_KNOWN = {*_TUPLES, "Tensor"}
_INNER = vars(nn.Module()).keys() | {"parameters_by_name", "matrices", "vectors"}
Owner = Layer | LinearMethod | ExpertsMethod


def save_snapshot(folder: Path, model: Model, config: EngineConfig, platform: Platform, rank: int) -> str:
    """Write what a rank has of a snapshot; return the kind of machine that it is for. Raises Unsupported."""
    is_elsewhere = model.host_weight_bytes or config.parallel.enable_eplb
    if config.model.load_format == "dummy" or is_elsewhere or config.checkpoint.mmproj:
        raise Unsupported(
            "A snapshot needs weights from files, all on the device, experts that stay (no enable_eplb), no "
            "mmproj file."
        )
    if config.model.load_format == "safetensors" and read_kv_scales(Path(config.checkpoint.path)):
        raise Unsupported("A snapshot does not keep a checkpoint's scales of keys and values.")
    size = save(model, folder, rank)
    if rank == 0 and platform.device.type == "cpu":
        keep_kernels(folder)
    logger.info("Rank %d: %.3g GiB", rank, size / (1 << 30))
    return platform.machine


def save(model: nn.Module, folder: Path, rank: int) -> int:
    """Write a loaded model's weights; returns their bytes. Raises Unsupported for what cannot be kept."""
    writer = _Writer()
    layers = {name: writer.layer(layer) for name, layer in _layers(model)}
    with _data(folder, rank).open("wb") as file:
        spans = [_write(file, storage, *span) for storage, span in writer.storages.values()]
        size = file.tell()
    index = {"layers": layers, "tensors": writer.tensors, "storages": spans, "bytes": size}
    _index(folder, rank).write_text(json.dumps(index), encoding="utf-8")
    return size


def restore(model: nn.Module, folder: Path, rank: int, device: torch.device) -> None:
    """Give a new model the weights of a snapshot. Raises BadCheckpoint."""
    path = _index(folder, rank)
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        reader = _Reader(index, _data(folder, rank), device)
        for name, layer in _layers(model):
            reader.layer(layer, index["layers"].pop(name))
    except (OSError, LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise BadCheckpoint(f"{path} cannot be used: {type(error).__name__}: {error}") from error
    if index["layers"]:
        raise BadCheckpoint(f"{path} is of another model: it has {next(iter(index['layers']))}.")


class _Writer:
    """Describes what is found, and gathers the memory behind it."""

    def __init__(self) -> None:
        self.tensors: list[tuple[int, str, list[int], list[int], int]] = []
        """Storage, type, shape, strides, and first byte in what is kept of the storage."""
        self.storages: dict[int, tuple[Tensor, list[int]]] = {}
        """By address: its bytes, and the part that is used."""

    def layer(self, layer: Layer) -> dict[str, Any]:
        return {
            "own": self._state(layer),
            "vectors": {name: self._value(parameter.data) for name, parameter in layer.vectors.items()},
            "matrices": [self._state(matrix) for matrix in layer.matrices],
            "bytes": {name: parameter.num_bytes for name, parameter in layer.parameters_by_name.items()},
        }

    def _state(self, owner: Owner) -> dict[str, Any]:
        """Describe what loading may have changed; structs over vectors stay, which are filled in place."""
        vectors = owner.vectors.values() if isinstance(owner, Layer) else ()
        known = {parameter.data.untyped_storage().data_ptr() for parameter in vectors}
        found = {}
        for name, value in vars(owner).items():
            tensors = list(_tensors(value)) if name not in _INNER else []
            is_filled = all(tensor.untyped_storage().data_ptr() in known for tensor in tensors)
            if tensors and not (is_filled and type(value).__name__ not in _KNOWN):
                found[name] = self._value(value)
            elif isinstance(value, bool) and name not in _INNER:
                found[name] = value
        return found

    def _value(self, value: Any) -> Any:
        match value:
            case None | bool() | int() | float() | str():
                return value
            case Tensor():
                return {"tensor": self._tensor(value)}
            case DenseParameter():
                return {"parameter": self._value(value.data)}
            case LinearMethod() | ExpertsMethod():
                return {"method": self._state(value)}
            case Blocks():
                return {"Blocks": [self._value(value.data), self._value(value.type)]}
            case list() | tuple() if type(value).__name__ in _TUPLES:
                return {type(value).__name__: [self._value(entry) for entry in value]}
        raise Unsupported(f"A snapshot cannot keep weights in a {type(value).__name__}.")

    def _tensor(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        size = tensor.element_size()
        start = int(tensor.storage_offset()) * size
        last = sum((int(n) - 1) * int(step) for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        span = [start, start + (last + 1) * size if tensor.numel() else start]
        if address not in self.storages:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self.storages[address] = whole, span
        known = self.storages[address][1]
        known[:] = min(known[0], span[0]), max(known[1], span[1])
        place = list(self.storages).index(address)
        kind = str(tensor.dtype).removeprefix("torch.")
        self.tensors.append((place, kind, list(tensor.shape), list(tensor.stride()), start))
        return len(self.tensors) - 1


class _Reader:
    """Makes what `_Writer` described."""

    def __init__(self, index: dict[str, Any], path: Path, device: torch.device) -> None:
        self._index, self._device = index, device
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if index["bytes"] else bytearray(1)
        if len(mapped) < index["bytes"]:
            raise ValueError(f"{path.name} has {len(mapped)} bytes of {index['bytes']}")
        self._bytes = torch.from_numpy(np.frombuffer(mapped, np.uint8))
        self._there: dict[int, Tensor] = {}

    def layer(self, layer: Layer, state: dict[str, Any]) -> None:
        for name, parameter in layer.vectors.items():
            parameter.data.copy_(self._value(state["vectors"].pop(name), None))
        del layer.matrices[len(state["matrices"]) :]  # unpacked when they were loaded
        for matrix, found in zip(layer.matrices, state["matrices"], strict=True):
            self._fill(matrix, found)
        self._fill(layer, state["own"])
        for name, stored in layer.parameters_by_name.items():
            stored.missing, stored.num_bytes = [], state["bytes"][name]
        if state["vectors"]:
            raise ValueError(f"vectors that the model has not: {list(state['vectors'])}")

    def _fill(self, owner: Owner, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(owner, name, self._value(value, vars(owner).get(name)))

    def _value(self, value: Any, before: Any) -> Any:
        """Return what is described; `before` is what stands in its place."""
        if not isinstance(value, dict):
            return value
        [(kind, content)] = value.items()
        if kind == "tensor":
            return self._tensor(*self._index["tensors"][content])
        if kind == "method":
            self._fill(before, content)
            return before
        if kind == "parameter":
            data = self._value(content, None)
            if data.shape != before.data.shape or data.dtype != before.data.dtype:
                raise ValueError(f"a matrix is {list(data.shape)}, the model's {list(before.data.shape)}")
            if data.device.type == before.data.device.type == "cpu":
                before.live_in(data)
            else:
                before.data.copy_(data)
            return before
        entries = [self._value(entry, None) for entry in content]
        made = _TUPLES[kind]
        return made(entries) if made in (list, tuple) else made(*entries)

    def _tensor(self, place: int, kind: str, shape: list[int], strides: list[int], start: int) -> Tensor:
        dtype = getattr(torch, kind)
        data = self._storage(place)
        first = start - self._index["storages"][place][0]
        if not isinstance(dtype, torch.dtype) or first % dtype.itemsize:
            raise ValueError(f"a tensor of type {kind} at byte {first}")
        flat = data[: len(data) // dtype.itemsize * dtype.itemsize].view(dtype)
        return flat.as_strided(shape, strides, first // dtype.itemsize + flat.storage_offset())

    def _storage(self, place: int) -> Tensor:
        """Return the bytes of a storage, on the device; packed matrices go there once."""
        if place not in self._there:
            _, size, offset = self._index["storages"][place]
            data = self._bytes.narrow(0, offset, size)
            self._there[place] = data if self._device.type == "cpu" else data.to(self._device)
        return self._there[place]


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value, as far as it can be kept."""
    match value:
        case Tensor():
            yield value
        case DenseParameter() | Blocks():
            yield value.data
        case list() | tuple():
            for entry in value:
                yield from _tensors(entry)
        case LinearMethod() | ExpertsMethod():
            for entry in vars(value).values():
                yield from _tensors(entry)


def loaded_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yield what loading filled, on whatever device; some share their memory."""
    yield from model.parameters()
    yield from model.buffers()
    for _, layer in _layers(model):
        yield from (parameter.data for parameter in layer.vectors.values())
        for owner in (layer, *layer.matrices):
            for name, value in vars(owner).items():
                yield from _tensors(value) if name not in _INNER else ()


def _layers(model: nn.Module) -> Iterator[tuple[str, Layer]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, Layer))


def _write(file: Any, storage: Tensor, start: int, end: int) -> tuple[int, int, int]:
    """Append a part of a storage. Return its first byte there, its size, and where it begins in the file."""
    start -= start % 64
    offset = -(-file.tell() // _ALIGNMENT) * _ALIGNMENT
    file.seek(offset)
    file.write(storage[start:end].cpu().numpy().data)
    return start, end - start, offset


def _data(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.weights"


def _index(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.json"
