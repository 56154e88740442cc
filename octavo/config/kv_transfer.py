"""`kv_transfer_config`: how keys and values get to other engines, and to this one after a restart.

{"kv_connector": "SharedStorageConnector", "kv_role": "kv_both",
 "kv_connector_extra_config": {"shared_storage_path": "/dev/shm/kv", "max_bytes": 10000000000}}
{"kv_connector": "TCPConnector", "kv_role": "kv_producer", "kv_ip": "10.0.0.5", "kv_port": 14579}
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from octavo.base import env
from octavo.base.errors import ConfigError, Unsupported

FOLDERS = ("SharedStorageConnector", "ExampleConnector")
"""Both names of vLLM's for the same: prefix blocks in a folder."""
SOCKETS = ("TCPConnector", "NixlConnector")
"""Blocks are fetched over TCP by the engine that `kv_transfer_params` sends there, as vLLM's NIXL does it."""
_ROLES = {"kv_both": (True, True), "kv_producer": (False, True), "kv_consumer": (True, False)}
_POLICIES = ("recompute", "fail")
_DEFAULT_BYTES = 16 << 30
_EXTRA = ("shared_storage_path", "max_bytes")
_NETWORK = ("kv_ip", "kv_port", "engine_id", "kv_load_failure_policy")


class KVTransferConfig(TypedDict, total=False):
    """The option's keys; a plain dict."""

    kv_connector: str
    kv_role: str
    kv_connector_extra_config: dict[str, Any]
    kv_ip: str
    kv_port: int
    engine_id: str
    kv_load_failure_policy: str


class KVStore(NamedTuple):
    """Where blocks are kept for others, and how they get there."""

    path: Path | None
    """A folder that engines share; None: a private one, served at host and port."""
    max_bytes: int
    reads: bool
    writes: bool
    host: str = ""
    port: int = 0
    engine_id: str = ""
    may_recompute: bool = True
    """A prompt whose blocks do not come is computed; else its request fails."""


def kv_store(config: Mapping[str, Any]) -> KVStore | None:
    """What the option asks for. Raises ConfigError, Unsupported for connectors that octavo has not."""
    if not config:
        return None
    names = ("kv_connector", "kv_role", _NESTED, *_NETWORK)
    name, role, extra, host, port, engine_id, policy = known_values(config, "kv_transfer_config", names)
    if name not in (*FOLDERS, *SOCKETS):
        raise Unsupported(
            f"kv_connector={name!r} is not supported: octavo shares KV caches by a folder or over TCP. Use "
            f"{FOLDERS[0]!r} with kv_connector_extra_config={{'shared_storage_path': FOLDER}}, or "
            f"{SOCKETS[0]!r} with kv_ip and kv_port."
        )
    if role not in _ROLES:
        raise ConfigError(f"kv_role must be one of {', '.join(_ROLES)}, got {role!r}.")
    path, max_bytes = known_values(extra or {}, _NESTED, _EXTRA)
    max_bytes = _DEFAULT_BYTES if max_bytes is None else max_bytes
    if not isinstance(max_bytes, int) or isinstance(max_bytes, bool) or max_bytes < 1:
        raise ConfigError(f"max_bytes must be a whole number above 0, got {max_bytes!r}.")
    if name in FOLDERS:
        if not isinstance(path, str) or not path:
            raise ConfigError(f"{_NESTED} must hold 'shared_storage_path', the folder that engines share.")
        return KVStore(Path(path), max_bytes, *_ROLES[role])
    listens = role != "kv_consumer" or port is not None
    host, port, policy = host or "127.0.0.1", 14579 if port is None else port, policy or _POLICIES[0]
    if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 65536:
        raise ConfigError(f"kv_port must be between 1 and 65535, got {port!r}.")
    if policy not in _POLICIES:
        raise ConfigError(f"kv_load_failure_policy must be one of {', '.join(_POLICIES)}, got {policy!r}.")
    if len(env.node_key()) < env.LEAST_NODE_KEY:
        raise ConfigError(
            f"{name} needs the variable OCTAVO_NODE_KEY: the same secret of at least {env.LEAST_NODE_KEY} "
            "characters for all engines that pass on keys and values (openssl rand -hex 32)."
        )
    may_recompute = policy == _POLICIES[0]
    port = port if listens else 0
    return KVStore(None, max_bytes, *_ROLES[role], str(host), port, str(engine_id or ""), may_recompute)


def passes_on(config: Mapping[str, Any]) -> bool:
    """Return True if requests may name another engine (`kv_transfer_params`)."""
    return config.get("kv_connector") in SOCKETS


_NESTED = "kv_connector_extra_config"


def known_values(given: object, where: str, names: tuple[str, ...]) -> list[Any]:
    """The values under `names`, None where there is none. Raises ConfigError for other names."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} must be an object, got {given!r}.")
    if unknown := sorted(str(name) for name in set(given) - set(names)):
        raise ConfigError(f"{where} has no {', '.join(unknown)}. Known: {', '.join(names)}.")
    return [given.get(name) for name in names]
