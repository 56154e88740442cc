"""`kv_transfer_config`: where keys and values are kept for other engines, and for this one after a restart.

{"kv_connector": "SharedStorageConnector", "kv_role": "kv_both",
 "kv_connector_extra_config": {"shared_storage_path": "/dev/shm/kv", "max_bytes": 10000000000}}
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from octavo.base.errors import ConfigError, Unsupported

CONNECTORS = ("SharedStorageConnector", "ExampleConnector")
"""Both names of vLLM's for the same: prefix blocks in a folder."""
_ROLES = {"kv_both": (True, True), "kv_producer": (False, True), "kv_consumer": (True, False)}
_DEFAULT_BYTES = 16 << 30
_EXTRA = ("shared_storage_path", "max_bytes")


class KVTransferConfig(TypedDict, total=False):
    """The option's keys; a plain dict."""

    kv_connector: str
    kv_role: str
    kv_connector_extra_config: dict[str, Any]


class SharedStorage(NamedTuple):
    """A folder for blocks of keys and values."""

    path: Path
    max_bytes: int
    reads: bool
    writes: bool


def shared_storage(config: Mapping[str, Any]) -> SharedStorage | None:
    """What the option asks for. Raises ConfigError, Unsupported for connectors that octavo has not."""
    if not config:
        return None
    name, role, extra = known_values(config, "kv_transfer_config", ("kv_connector", "kv_role", _NESTED))
    if name not in CONNECTORS:
        raise Unsupported(
            f"kv_connector={name!r} is not supported: octavo shares KV caches through a folder. Use "
            f"{CONNECTORS[0]!r} with kv_connector_extra_config={{'shared_storage_path': FOLDER}}."
        )
    if role not in _ROLES:
        raise ConfigError(f"kv_role must be one of {', '.join(_ROLES)}, got {role!r}.")
    path, max_bytes = known_values(extra or {}, _NESTED, _EXTRA)
    if not isinstance(path, str) or not path:
        raise ConfigError(f"{_NESTED} must hold 'shared_storage_path', the folder that engines share.")
    max_bytes = _DEFAULT_BYTES if max_bytes is None else max_bytes
    if not isinstance(max_bytes, int) or isinstance(max_bytes, bool) or max_bytes < 1:
        raise ConfigError(f"max_bytes must be a whole number above 0, got {max_bytes!r}.")
    return SharedStorage(Path(path), max_bytes, *_ROLES[role])


_NESTED = "kv_connector_extra_config"


def known_values(given: object, where: str, names: tuple[str, ...]) -> list[Any]:
    """The values under `names`, None where there is none. Raises ConfigError for other names."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} must be an object, got {given!r}.")
    if unknown := sorted(str(name) for name in set(given) - set(names)):
        raise ConfigError(f"{where} has no {', '.join(unknown)}. Known: {', '.join(names)}.")
    return [given.get(name) for name in names]
