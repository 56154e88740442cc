"""Where the model runs: executors by name. The core is given one and does not know which."""

from octavo.base.registry import Registry, load_object
from octavo.config.engine import EngineConfig
from octavo.engine.executor.interface import Executor

WORKER = "octavo.runtime.worker.worker:Worker"
"""What executors run: the runtime is another wing, started by name only."""

EXECUTORS: Registry[type[Executor]] = Registry(
    "executor",
    {
        "inproc": "octavo.engine.executor.inproc:InprocExecutor",
        "external_launcher": "octavo.engine.executor.inproc:LaunchedExecutor",
        "mp": "octavo.engine.executor.multiprocess:MultiprocessExecutor",
        "ray": "octavo.engine.executor.ray_cluster:RayExecutor",
    },
)


def make_executor(config: EngineConfig) -> Executor:
    """Return the executor that the config names: a registered one, or a class as "module:Class"."""
    name = config.parallel.distributed_executor_backend
    kind = load_object(name) if ":" in name else EXECUTORS.load(name)
    executor: Executor = kind()
    return executor
