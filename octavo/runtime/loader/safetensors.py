"""Reads a folder of safetensors files tensor by tensor; the files are mapped, so a rank touches its own part
only.

The files are untrusted: the safetensors library checks their headers, this module what the index says of
them.
"""

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from octavo.base.errors import BadCheckpoint, Unsupported
from octavo.config.checkpoint import read_json
from octavo.config.engine import EngineConfig
from octavo.runtime.layers.build import named_parameters
from octavo.runtime.loader.piece import Piece
from octavo.runtime.loader.read_ahead import ReadAhead
from octavo.runtime.models.arch import Arch
from octavo.runtime.models.interface import Family
from octavo.runtime.models.weights import layer_of
from octavo.runtime.quantization.method import select_scheme
from octavo.runtime.quantization.parameter import Parameter

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_HEAD = "lm_head."


def read(config: EngineConfig, model: Family, arch: Arch) -> Iterator[Piece]:
    """Yield every tensor of the checkpoint. Raises BadCheckpoint, naming file and tensor."""
    is_ahead = config.model.safetensors_load_strategy == "prefetch"
    return to_pieces(read_tensors(Path(config.checkpoint.path), is_ahead), config, model, arch)


def to_pieces(
    tensors: Iterable[tuple[str, str, Tensor]], config: EngineConfig, model: Family, arch: Arch
) -> Iterator[Piece]:
    """Yield where tensors belong. Raises BadCheckpoint. tensors: (origin for messages, name, tensor)"""
    parameters, scheme = named_parameters(model), select_scheme(config)
    has_head = any(name.startswith(_HEAD) for name in parameters)
    for origin, stored_name, tensor in tensors:
        name = scheme.stored_name(stored_name)
        if name is None or model.WEIGHTS.ignores(name):
            continue
        if model.has_spare_layers and (layer_of(name) or 0) >= len(arch.layers):
            continue
        target = model.WEIGHTS.find(name)
        if target is None:
            raise BadCheckpoint(f"{origin} is not known to {type(model).__name__}")
        if (target.module.startswith(_HEAD) and not has_head) or model.is_elsewhere(target.module):
            continue
        parameter = parameters.get(target.module)
        if parameter is not None and parameter.layout.is_elsewhere(target.shard):
            continue
        allowed = Parameter.dtypes if parameter is None else parameter.dtypes
        if tensor.dtype not in allowed:
            raise BadCheckpoint(f"{origin} is {tensor.dtype}; {_listed(allowed)} can be read")
        if target.transform is not None and parameter is not None and not parameter.is_movable:
            raise Unsupported(f"{origin}: octavo cannot rearrange the packed weights of this architecture")
        yield Piece(origin, target.module, target.shard, target.convert(tensor, arch))


def _listed(dtypes: tuple[torch.dtype, ...]) -> str:
    *first, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    return f"{', '.join(first)} and {last}" if first else f"only {last}"


def read_tensors(folder: Path, is_ahead: bool = False) -> Iterator[tuple[str, str, Tensor]]:
    """Yield a folder's tensors, mapped: (origin for messages, name, tensor). Raises BadCheckpoint.

    is_ahead: have the files read into the page cache meanwhile
    """
    files = _find_files(folder)
    with ReadAhead(list(files)) if is_ahead else nullcontext():
        yield from _read_files(files)


def read_file(path: Path) -> Iterator[tuple[str, str, Tensor]]:
    """Yield one file's tensors, as `read_tensors` does."""
    return _read_files({path: None})


def _read_files(files: dict[Path, list[str] | None]) -> Iterator[tuple[str, str, Tensor]]:
    for path, names in files.items():
        try:
            with safe_open(path, "pt") as file:
                present = file.keys()
                for name in sorted(present) if names is None else names:
                    origin = f"{path}: tensor {name!r}"
                    if name not in present:
                        raise BadCheckpoint(f"{origin} is announced by {_INDEX} but not there")
                    yield origin, name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise BadCheckpoint(f"{path} cannot be read: {error}") from error


def _find_files(folder: Path) -> dict[Path, list[str] | None]:
    """Return the files to read with the tensors to take from each; None = all of them."""
    if (folder / _INDEX).is_file():
        return _read_index(folder)
    if (folder / _SINGLE).is_file():
        return {folder / _SINGLE: None}
    return dict.fromkeys(sorted(folder.glob("*.safetensors")))


def _read_index(folder: Path) -> dict[Path, list[str] | None]:
    """Return the files by the index's weight map; their names must stay in the folder."""
    index = folder / _INDEX
    try:
        weight_map = read_json(index)["weight_map"]
        rows = [(str(name), str(file)) for name, file in weight_map.items()]
    except (KeyError, TypeError, AttributeError) as error:
        raise BadCheckpoint(f"{index} holds no weight_map: {error!r}") from error
    files: dict[Path, list[str]] = {}
    for name, file in rows:
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise BadCheckpoint(
                f"{index}: tensor {name!r} is said to be in {file!r}, not a safetensors file of the folder"
            )
        files.setdefault(folder / file, []).append(name)
    missing = [str(path) for path in files if not path.is_file()]
    if missing:
        raise BadCheckpoint(f"{index} names files that are not there: {', '.join(missing)}")
    return dict(files)
