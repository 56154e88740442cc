"""`weight_transfer_config`: how a trainer sends weights to a running engine, and where they are kept.

{"backend": "nccl", "keep_in": "/dev/shm/weights"}
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from octavo.base.errors import ConfigError, Unsupported
from octavo.config.kv_transfer import known_values

Backend = Literal["nccl", "ipc"]
"""A broadcast (gloo on CPUs); memory of the trainer that the ranks open (on CPUs a mapped file)."""
_NAME = "weight_transfer_config"


class WeightTransferConfig(NamedTuple):
    """backend: the way; keep_in: a folder in which the weights wait for an engine started after a crash."""

    backend: str
    keep_in: Path | None


def weight_transfer(config: Mapping[str, Any]) -> WeightTransferConfig | None:
    """What the option asks for; None for nothing. Raises ConfigError, Unsupported."""
    if not config:
        return None
    backend, keep_in = known_values(config, _NAME, ("backend", "keep_in"))
    backend = "nccl" if backend is None else backend
    if backend not in get_args(Backend):
        known = ", ".join(get_args(Backend))
        raise Unsupported(f"{_NAME}: backend={backend!r} is not supported; use one of {known}.")
    if keep_in is not None and (not isinstance(keep_in, str) or not keep_in):
        raise ConfigError(f"{_NAME}: keep_in must be the path of a folder, got {keep_in!r}.")
    return WeightTransferConfig(backend, Path(keep_in) if keep_in else None)
