"""`RayExecutor`: Ray chooses the machines, one bundle of a placement group per rank; then they are nodes.

Each rank is a Ray task that runs `engine.node`: it joins the engine's hub as any other node does, over TCP,
by a key that is made for this engine. So Ray carries no step, and what holds for nodes holds here.
"""

import threading
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from secrets import token_hex
from typing import Any

from octavo.base.errors import ConfigError, EngineDead
from octavo.base.link import free_port
from octavo.base.log import get_logger
from octavo.config.engine import EngineConfig
from octavo.config.parallel import ParallelConfig
from octavo.engine.executor import WORKER
from octavo.engine.executor.multiprocess import GRACE_S, MultiprocessExecutor
from octavo.engine.node import run_node
from octavo.messages.kv import ModelReady

logger = get_logger(__name__)


def initialize_ray_cluster(parallel_config: ParallelConfig, ray_address: str | None = None) -> Any:
    """Connect to Ray and return a placement group with a bundle per rank: the caller's, if it runs in one.

    ray_address: None = the cluster of this machine, or a new one on it alone
    Raises ConfigError when Ray is not installed or the cluster has too few devices.
    """
    ray = _import_ray()
    if not ray.is_initialized():
        options = {"log_to_driver": False, "ignore_reinit_error": True}
        try:
            ray.init(address=ray_address or "auto", **options)
        except ConnectionError:
            if ray_address:
                raise ConfigError(f"There is no Ray cluster at {ray_address!r}.") from None
            logger.info("There is no Ray cluster: one is started on this machine alone.")
            ray.init(address="local", include_dashboard=False, **options)
    device, count = _resource(parallel_config), parallel_config.world_size
    if (given := ray.util.get_current_placement_group()) is not None:
        if (num_given := sum(bundle.get(device, 0) >= 1 for bundle in given.bundle_specs)) < count:
            raise ConfigError(
                f"The number of required {device}s ({count}) exceeds the total number of available {device}s "
                f"in the placement group ({num_given})."
            )
        return given
    if (there := int(ray.cluster_resources().get(device, 0))) < count:
        raise ConfigError(
            f"The number of required {device}s ({count}) exceeds the total number of available {device}s "
            f"in the Ray cluster ({there})."
        )
    here = {f"node:{ray.util.get_node_ip_address()}": 0.001}  # the first rank answers to the engine beside it
    bundles = [{device: 1.0} | (here if rank == 0 else {}) for rank in range(count)]
    group = ray.util.placement_group(bundles, strategy="PACK")
    if not ray.wait([group.ready()], timeout=parallel_config.distributed_timeout_seconds)[0]:
        ray.util.remove_placement_group(group)
        raise ConfigError(
            f"Ray had no room for {count} bundles of one {device} within "
            f"{parallel_config.distributed_timeout_seconds} s; `ray status` says who has them."
        )
    return group


class RayExecutor(MultiprocessExecutor):
    """A rank per bundle; the engine has none in its own process."""

    def __init__(self, worker: str = WORKER) -> None:
        super().__init__(worker)
        self._key = token_hex(32)
        self._tasks: list[Any] = []
        self._remove: list[Any] = []
        """Placement groups made here."""

    def start(self, config: EngineConfig) -> ModelReady:
        """Place the ranks, and load the model. After ConfigError or EngineDead nothing is left running."""
        group, ray = initialize_ray_cluster(config.parallel), _import_ray()
        if group != ray.util.get_current_placement_group():
            self._remove = [group]
        host, count = ray.util.get_node_ip_address(), config.parallel.world_size
        parallel = replace(
            config.parallel,
            device=config.parallel.device_kind,  # Ray shows each rank its own
            nnodes=count + 1,
            master_addr=host,
            master_port=free_port(host),
        )
        device = _resource(parallel)
        indexes = [i for i, bundle in enumerate(group.bundle_specs) if bundle.get(device, 0) >= 1][:count]
        for node_rank, index in enumerate(indexes, 1):
            here = replace(config, parallel=replace(parallel, node_rank=node_rank))
            task = ray.remote(_serve_rank).options(
                num_cpus=int(device == "CPU"),
                num_gpus=int(device == "GPU"),
                max_retries=0,
                scheduling_strategy=ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=index
                ),
            )
            self._tasks.append(task.remote(here.to_msgpack(), self._worker_class, self._key))
        threading.Thread(target=partial(self._wait, ray), name="ray-tasks", daemon=True).start()
        try:
            return super().start(replace(config, parallel=parallel))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        super().close()
        if self._tasks:
            ray = _import_ray()
            _, left = ray.wait(self._tasks, num_returns=len(self._tasks), timeout=GRACE_S)
            for task in left:
                ray.cancel(task, force=True)
            self._tasks.clear()
        while self._remove:
            ray.util.remove_placement_group(self._remove.pop())

    def _wait(self, ray: Any) -> None:
        """Thread: a task that fails says why, be it before its rank has joined."""
        with suppress(Exception):
            first, _ = ray.wait(list(self._tasks), num_returns=1)
            try:
                ray.get(first)
            except Exception as error:
                cause = getattr(error, "cause", error)
                known = isinstance(cause, ConfigError)
                self._lose(ConfigError(str(cause)) if known else EngineDead(f"A rank's Ray task: {cause}"))


def _serve_rank(config: bytes, worker: str, key: str) -> None:
    """In a process of Ray's: be a node of one rank until the engine ends."""
    run_node(EngineConfig.from_msgpack(config), worker, key, joins_again=False)


def _import_ray() -> Any:
    try:
        import_module("ray.util.scheduling_strategies")
        return import_module("ray")
    except ImportError as error:
        raise ConfigError(
            f"distributed_executor_backend='ray' needs Ray ({error}): pip install 'octavo[ray]'."
        ) from None


def _resource(parallel: ParallelConfig) -> str:
    return "GPU" if parallel.device_kind in ("cuda", "rocm") else "CPU"
