"""One rank in each of the processes that torchrun started, which all run the same program.

Every process has a whole engine. They plan the same steps, because they are given the same requests in the
same order: a program must not make them depend on its rank.
"""

from dataclasses import replace

from octavo.base import env
from octavo.config.engine import EngineConfig
from octavo.engine.executor import WORKER
from octavo.engine.executor.inproc import InprocExecutor
from octavo.messages.kv import ModelReady


class LaunchedExecutor(InprocExecutor):
    """Meets the other processes' ranks where torchrun's variables say (`env://`)."""

    def __init__(self) -> None:
        super().__init__(WORKER, env.launched_rank(), "env://")

    def start(self, config: EngineConfig) -> ModelReady:
        """Load this rank's part of the model, on a GPU of its own. Raises ConfigError."""
        if config.parallel.device == "cuda":
            device = f"cuda:{env.launched_device()}"
            config = replace(config, parallel=replace(config.parallel, device=device))
        return super().start(config)
