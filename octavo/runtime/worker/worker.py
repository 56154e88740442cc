"""One rank: the device's share of the model and of the KV cache.

Started by an executor, in the engine's process or in one of its own (worker/main). Runs on one thread.
"""

from typing import Any

import torch

from octavo.base.errors import Unsupported
from octavo.config.engine import EngineConfig
from octavo.messages.kv import CachePlan, ModelReady
from octavo.messages.step import ModelRunnerOutput, SchedulerOutput
from octavo.runtime.distributed.context import ParallelContext
from octavo.runtime.loader.loader import load_model
from octavo.runtime.platforms.platform import get_platform
from octavo.runtime.sampling.sampler import Sampler
from octavo.runtime.worker.kv_tensors import KVTensors, group_layers
from octavo.runtime.worker.model_runner import ModelRunner
from octavo.runtime.worker.request_state import RequestState


class Worker:
    """Loads, allocates, then executes steps in the order given."""

    def __init__(self, config: EngineConfig, rank: int = 0, init_method: str = "") -> None:
        self._config = config
        self._platform = get_platform(config.parallel.device, config.parallel.cpu_threads)
        self._parallel = ParallelContext.create(
            rank, config.parallel.tensor_parallel_size, init_method, self._platform.device
        )

    def load(self) -> ModelReady:
        """Load the model; returns the cache groups and the bytes left for them."""
        self._model = load_model(self._config, self._platform, self._parallel)
        groups = group_layers([layer.kv_spec for layer in self._model.attention_layers])
        share = self._config.cache.gpu_memory_utilization
        return ModelReady(groups, int(self._platform.available_memory_bytes() * share))

    def allocate(self, plan: CachePlan) -> None:
        """Allocate the planned cache and the batch state."""
        config, device = self._config, self._platform.device
        num_slots = config.scheduler.max_num_seqs
        cache = KVTensors(plan, getattr(torch, config.cache.kv_cache_dtype), device)
        state = RequestState(num_slots, config.model.max_model_len, plan, device)
        vocab_size = config.checkpoint.vocab_size
        sampler = Sampler(vocab_size, num_slots, device, config.model.logprobs_mode)
        self._runner = ModelRunner(self._model, cache, state, sampler, config.model.logprobs_mode)

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step."""
        return self._runner.execute(step)

    def call(self, verb: str, arguments: dict[str, Any]) -> Any:
        """Answer a control verb. Raises Unsupported for an unknown one."""
        if verb == "describe":
            return self.describe()
        raise Unsupported(f"Workers know no verb {verb!r}. Known: describe.")

    def describe(self) -> dict[str, Any]:
        """What this rank holds, as plain types."""
        weights = sum(t.numel() * t.element_size() for t in self._model.state_dict().values())
        return {
            "device": str(self._platform.device),
            "kernels": self._platform.kernels.name,
            "tp_rank": self._parallel.tp_rank,
            "weight_bytes": weights,
        }

    def close(self) -> None:
        """Leave the process group."""
        self._parallel.close()
