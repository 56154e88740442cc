"""`fingerprint`: equal for engines whose keys and values may be exchanged, and for no others.

Called once by the core, at the start, where blocks are shared. Everything that the numbers in a block
depend on beside the tokens goes in. Weights are known by name, size, time and samples of their files, for
reading all of them would take longer than loading; so a copy with other times counts as another model.
`node_facts` serves the nodes of one engine, whose copies may have other times.
"""

import os
from collections.abc import Iterator
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

import msgspec

from octavo.config.engine import EngineConfig
from octavo.messages.kv import CachePlan
from octavo.version import __version__

_SUFFIXES = {".safetensors", ".gguf", ".weights"}
_STRIDE = 1 << 20
_SAMPLE = 64


def fingerprint(config: EngineConfig, plan: CachePlan, *, with_times: bool = True) -> bytes:
    """Return 32 bytes. Raises OSError when the model's files cannot be read.

    with_times: whether a copy of the files is another model
    """
    parallel, model = config.parallel, config.model
    facts = (
        __version__,
        config.checkpoint.config,
        (model.dtype, model.load_format, model.model_impl, model.quantization, model.activations),
        model.quantization_config,
        model.max_model_len,  # some ropes depend on it
        model.seed if model.load_format == "dummy" else None,
        (parallel.device_kind, parallel.tensor_parallel_size, parallel.pipeline_parallel_size),
        (config.cache.kv_cache_dtype, plan.block_size, plan.state_interval, plan.groups),
        (plan.context_ranks, parallel.cp_kv_cache_interleave_size),
        config.scheduler.speculative_config.get("model"),  # its keys and values are in the blocks, too
    )
    digest = sha256(msgspec.json.encode(facts, order="sorted"))
    for part in _weights(Path(config.checkpoint.path), with_times=with_times):
        digest.update(part)
    return digest.digest()


def _weights(path: Path, *, with_times: bool = True) -> Iterator[bytes]:
    files = [path] if path.is_file() else sorted(p for p in path.glob("*") if p.suffix in _SUFFIXES)
    for file in files:
        with file.open("rb") as opened:
            state = os.fstat(opened.fileno())
            yield f"\n{file.name} {state.st_size} {with_times and state.st_mtime_ns}\n".encode()
            for offset in range(0, state.st_size, _STRIDE):
                yield os.pread(opened.fileno(), _SAMPLE, offset)


def node_facts(config: EngineConfig) -> dict[str, str]:
    """Return by name what all nodes of an engine must have in common. Reads samples of the weights only.

    Raises OSError when the model's files cannot be read.
    """
    parallel, model = config.parallel, config.model
    facts = {
        "octavo": __version__,
        "torch": version("torch"),
        "device": parallel.device,
        "nnodes": str(parallel.nnodes),
        "tensor_parallel_size": str(parallel.tensor_parallel_size),
        "pipeline_parallel_size": str(parallel.pipeline_parallel_size),
        "dtype": model.dtype,
        "load_format": model.load_format,
        "quantization": model.quantization,
        "model": _digest(config),
    }
    return facts if config.draft is None else facts | {"draft model": _digest(config.draft)}


def _digest(config: EngineConfig) -> str:
    digest = sha256(msgspec.json.encode(config.checkpoint.config, order="sorted"))
    for part in _weights(Path(config.checkpoint.path), with_times=False):
        digest.update(part)
    return digest.hexdigest()[:16]
