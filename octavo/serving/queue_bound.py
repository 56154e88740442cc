"""`bounded`: a server's engine lets a bounded number of requests wait, where its user chose none."""

from dataclasses import replace

from octavo.config.engine import EngineConfig

_QUEUED_PER_SEAT = 4


def bounded(config: EngineConfig) -> EngineConfig:
    """The config with a bound of the queue, if none was chosen."""
    if config.front.max_num_queued_reqs >= 0:
        return config
    bound = _QUEUED_PER_SEAT * config.scheduler.max_num_seqs * config.parallel.num_replicas
    return replace(config, front=replace(config.front, max_num_queued_reqs=bound))
