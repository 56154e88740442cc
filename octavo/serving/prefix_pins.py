"""/v1/prefix_cache/pins: prefixes that operators keep in the cache. Who may ask: as in `admin`."""

from typing import Any

from starlette.requests import Request

from octavo.frontend.prefix_pins import PinRequest, pin_prefix
from octavo.serving.admin import for_operators
from octavo.serving.body import read_body
from octavo.serving.caller import Caller
from octavo.serving.errors import HTTPError
from octavo.serving.registry import Route

_PATH = "/v1/prefix_cache/pins"


async def pin(request: Request) -> dict[str, Any]:
    """Keep a prefix in the cache; 400 when it is beyond the budget (--prefix-pin-share)."""
    body, caller = await read_body(request, PinRequest), Caller.of(request)
    engine = caller.engine
    with engine.reserve():
        prompt = await engine.off_loop(lambda: body.read(engine))
    return await pin_prefix(engine, body, caller.salted(prompt, None))


async def list_pins(request: Request) -> dict[str, Any]:
    """All that is kept, the least first: firm pins, and prompts with retention_s."""
    return {"pins": await Caller.of(request).engine.core.call("list_pins")}


async def unpin(request: Request) -> dict[str, Any]:
    """Let go of a pin."""
    name = request.path_params["pin_id"]
    if not await Caller.of(request).engine.core.call("unpin_prefix", {"id": name}):
        raise HTTPError(404, f"There is no pin {name[:64]!r}: it was released, or its time is over.")
    return {"id": name, "deleted": True}


ROUTES = [
    Route(_PATH, for_operators(pin, "pin_prefix", pin.__doc__), PinRequest),
    Route(_PATH, for_operators(list_pins, "list_pins", list_pins.__doc__)),
    Route(f"{_PATH}/{{pin_id}}", for_operators(unpin, "unpin_prefix", unpin.__doc__), methods=("DELETE",)),
]
