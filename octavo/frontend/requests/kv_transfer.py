"""`kv_transfer_params` of a request, in vLLM's terms: where its prompt was computed, or who goes on with it.

{"do_remote_decode": true} to the engine that computes the prompt; its answer tells what the request to the
engine that goes on must carry. With remote_host and remote_port of that engine it is given the blocks.
"""

from collections.abc import Mapping
from typing import Any

from octavo.base.errors import RequestError, wrong
from octavo.messages.request import KVSource

_NAME = "kv_transfer_params"


def read_transfer(params: Mapping[str, Any], has_connector: bool) -> tuple[KVSource | None, KVSource | None]:
    """Return where the prompt has been computed, and which engine goes on with it; port 0: any that asks.

    has_connector: the engine passes on keys and values over TCP. Raises RequestError.
    """
    if not isinstance(params, Mapping):
        raise wrong(_NAME, f"must be an object, got {params!r}")
    fetches, passes_on = (params.get(name, False) for name in ("do_remote_prefill", "do_remote_decode"))
    if not isinstance(fetches, bool) or not isinstance(passes_on, bool):
        raise RequestError(f"{_NAME}: do_remote_prefill and do_remote_decode are true or false.", _NAME)
    if (fetches or passes_on) and not has_connector:
        raise wrong(_NAME, "needs an engine with kv_transfer_config={'kv_connector': 'TCPConnector', …}")
    host, port = params.get("remote_host"), params.get("remote_port")
    if not fetches and (not passes_on or host is port is None):
        return None, KVSource("", 0) if passes_on else None
    if not isinstance(host, str) or not host or type(port) is not int or not 0 < port < 65536:
        raise RequestError(
            f"{_NAME}: do_remote_prefill needs remote_host and remote_port of the engine that has computed "
            f"the prompt, do_remote_decode may name those of the one to push to, got {host!r} and {port!r}.",
            _NAME,
        )
    named = KVSource(host, port)
    return (named, KVSource("", 0) if passes_on else None) if fetches else (None, named)


def told(source: KVSource | None) -> dict[str, Any] | None:
    """Return the parameters of the request that goes on."""
    if source is None:
        return None
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": source.engine_id,
        "remote_request_id": source.request_id,
        "remote_host": source.host,
        "remote_port": source.port,
        "remote_block_ids": list(range(source.num_blocks)),
        "tp_size": source.num_ranks,
    }
