"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, where the server's operator allows them."""

from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from octavo.serving.adapters import ServedAdapters, invalid_input
from octavo.serving.body import read_body
from octavo.serving.caller import Caller
from octavo.serving.errors import HTTPError
from octavo.serving.registry import Route


class LoadAdapter(msgspec.Struct):
    """An adapter and its name."""

    lora_name: str = ""
    lora_path: str = ""
    """In --lora-folder."""
    load_inplace: bool = False
    """Take the place of an adapter of this name."""
    base_model_name: str | None = None
    is_3d_lora_weight: bool = False


class UnloadAdapter(msgspec.Struct):
    """The name of an adapter."""

    lora_name: str = ""
    lora_int_id: int | None = None
    """Of no meaning: names are unique."""
    wait_s: Annotated[float, Meta(ge=0, le=3600)] | None = None
    """Seconds to wait for requests that use it; 0 = refuse while there are some; without end if left out."""


async def load_lora_adapter(request: Request) -> Response:
    """Load an adapter, which requests may then name as their model."""
    adapters = _adapters(request)
    body = await read_body(request, LoadAdapter)
    if not body.lora_name or not body.lora_path:
        raise invalid_input("Both 'lora_name' and 'lora_path' must be provided.")
    path = adapters.confined(body.lora_path)
    await adapters.load(body.lora_name, path, in_place=body.load_inplace, parent=body.base_model_name or "")
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload_lora_adapter(request: Request) -> Response:
    """Take an adapter's name away; requests that use it are finished first."""
    adapters = _adapters(request)
    body = await read_body(request, UnloadAdapter)
    if not body.lora_name:
        raise invalid_input("'lora_name' needs to be provided to unload a LoRA adapter.", "lora_name")
    await adapters.unload(body.lora_name, body.wait_s)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _adapters(request: Request) -> ServedAdapters:
    """Return the adapters, which whoever asks may change. Raises HTTPError."""
    caller = Caller.of(request)
    if caller.engines.only() is None:
        path = request.scope["endpoint"].path
        raise HTTPError(404, f"{path} is not there: adapters are for servers of one model.")
    if not caller.config.allow_runtime_lora_updating:
        path = request.scope["endpoint"].path
        raise HTTPError(404, f"{path} is off: start the server with --allow-runtime-lora-updating.")
    if caller.config.admin_api_key and not caller.is_admin:
        raise HTTPError(403, "This needs a key of an admin (--admin-api-key).")
    return caller.engines.adapters


ROUTES = [
    Route("/v1/load_lora_adapter", load_lora_adapter, LoadAdapter, media_type="text/plain"),
    Route("/v1/unload_lora_adapter", unload_lora_adapter, UnloadAdapter, media_type="text/plain"),
]
