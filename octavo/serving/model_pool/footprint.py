"""`Footprint`: what a model takes of the memory, awake and asleep. `measure` asks what `octavo plan` asks.

The plan is made in a process of its own: it builds the model on a device without memory, which takes torch.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from octavo.base.errors import ConfigError
from octavo.base.processes import child_environment, python_command
from octavo.config.engine import EngineConfig

_MODULE = "octavo.engine.plan_process"
_PROCESS_BYTES = 400 << 20
"""Of an engine process beside weights and cache: the interpreter, torch, kernels."""
_CONTEXT_BYTES = 600 << 20
"""Of a GPU that a sleeping engine keeps."""
_UNKNOWN_CACHE_BYTES = 4 << 30
"""Taken for the cache of a model that only loading can measure."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes on the host, and on each GPU."""

    host_awake: int
    host_asleep: int
    gpu_awake: int = 0
    gpu_asleep: int = 0
    cache_bytes: int = 0
    """Of what is awake: the KV cache."""


async def measure(config: EngineConfig, host_bytes: int, gpu_bytes: int) -> Footprint:
    """Return what a model will take. Raises ConfigError when it could not be loaded even alone.

    host_bytes, gpu_bytes: all that models may take together, of each GPU
    """
    on_gpu = config.parallel.device != "cpu"
    plan = await _plan(config, gpu_bytes if on_gpu else host_bytes)
    if "unknown" in plan:
        weights = file_bytes(Path(config.checkpoint.path))
        return _on_host(weights, _UNKNOWN_CACHE_BYTES)
    if problem := plan.get("error") or plan["problem"]:
        raise ConfigError(problem)
    if not on_gpu:
        return _on_host(plan["weight_bytes"], plan["kv_bytes"], plan["table_bytes"] + plan["host_bytes"])
    used = ("weight_bytes", "step_bytes", "recorded_bytes", "table_bytes", "adapter_bytes", "kv_bytes")
    host = _PROCESS_BYTES + (plan["host_weight_bytes"] + plan["host_bytes"]) * plan["num_ranks"]
    copy = (plan["weight_bytes"] - plan["host_weight_bytes"]) * plan["num_ranks"]
    if host + copy <= host_bytes:  # else the engine keeps no copy for its sleep
        host += copy
    return Footprint(
        host_awake=host,
        host_asleep=host,
        gpu_awake=_CONTEXT_BYTES + sum(plan[name] for name in used) - plan["host_weight_bytes"],
        gpu_asleep=_CONTEXT_BYTES,
        cache_bytes=plan["kv_bytes"],
    )


def _on_host(weight_bytes: int, cache_bytes: int, other_bytes: int = 0) -> Footprint:
    """Asleep, an engine on a CPU keeps its weights."""
    asleep = _PROCESS_BYTES + weight_bytes
    return Footprint(asleep + cache_bytes + other_bytes, asleep, cache_bytes=cache_bytes)


async def _plan(config: EngineConfig, device_bytes: int) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        *python_command(_MODULE, str(device_bytes)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=child_environment(),
    )
    try:
        told, _ = await process.communicate(config.to_msgpack())
        plan: dict[str, Any] = msgspec.json.decode(told)
    except msgspec.DecodeError:
        raise ConfigError("Its memory could not be planned; the log has the details.") from None
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    return plan


def file_bytes(path: Path) -> int:
    """The bytes of a file, or of all weights in a folder."""
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.gguf")]
    return sum(file.stat().st_size for file in files)
