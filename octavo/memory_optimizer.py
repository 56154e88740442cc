"""`MemoryOptimizer`: where a model's memory goes, and what would make it less; a face of `octavo plan`."""

from typing import Any, TypedDict

import psutil

from octavo.base.registry import load_object
from octavo.cli.units import whole_number
from octavo.config.args import EngineArgs
from octavo.config.resolve import resolve
from octavo.metrics.nvml import read_gpus

_PLAN = "octavo.engine.memory_plan:plan_memory"
_LESS_KV = "8 bits for keys and values: kv_cache_dtype='fp8' on a GPU, 'int8' on a CPU"
_LESS_WEIGHTS = "8 bits per weight: quantization='int8'; or cpu_offload_gb on a GPU"
_LESS_STEP = "smaller steps: max_num_batched_tokens, max_num_seqs"


class Place(TypedDict):
    """One use of memory."""

    size: int
    """Bytes, per device."""
    location: str
    """cpu or cuda."""
    optimization: str
    """What would make it less."""


class MemoryOptimizer:
    """Plans, and loads nothing."""

    def __init__(self, model_size: str | float, available_memory: str | float = 0, **options: Any) -> None:
        """model_size: a model's name, whose files tell its sizes; or the bytes of its weights.

        available_memory: bytes of each device, also as "80GiB"; 0: what is free here now
        options: of the engine, for a model by name
        """
        self._model_size = model_size
        given = available_memory
        self._available = whole_number(given) if isinstance(given, str) else int(given)
        self._options = options

    def optimize_memory_layout(self) -> dict[str, Place]:
        """model_weights, kv_cache and intermediate. Raises ConfigError for a model that cannot be read.

        Of a bare number of bytes no intermediate results are known: what the weights leave of the memory that
        may be used is the cache's.
        """
        if not isinstance(self._model_size, str):
            weights, device = int(self._model_size), "cuda" if read_gpus() else "cpu"
            usable = EngineArgs().gpu_memory_utilization * (self._available or _free_bytes())
            return _layout(device, weights, max(0, int(usable) - weights), 0)
        args = EngineArgs.from_options({"model": self._model_size, **self._options})
        config = resolve(args, needs_device=False)
        plan = load_object(_PLAN)(config, self._available)
        on_device = plan.weight_bytes - plan.host_weight_bytes
        work = plan.step_bytes + plan.recorded_bytes + plan.table_bytes
        return _layout(plan.device, on_device, plan.kv_bytes, work)


def _layout(device: str, weights: int, kv_cache: int, intermediate: int) -> dict[str, Place]:
    return {
        "model_weights": Place(size=weights, location=device, optimization=_LESS_WEIGHTS),
        "kv_cache": Place(size=kv_cache, location=device, optimization=_LESS_KV),
        "intermediate": Place(size=intermediate, location=device, optimization=_LESS_STEP),
    }


def _free_bytes() -> int:
    """Of the GPU with the least free memory, else of the machine."""
    gpus = [gpu.total_bytes - gpu.used_bytes for gpu in read_gpus()]
    return min(gpus, default=int(psutil.virtual_memory().available))
