"""Routes that clients of other servers know and octavo does not have yet: 404, and what would work."""

from starlette.requests import Request
from starlette.responses import Response

from octavo.base.foreign import ROUTES as FOREIGN_ROUTES
from octavo.serving.errors import HTTPError
from octavo.serving.registry import Route


async def refuse(request: Request) -> Response:
    """Say that there is no such route yet."""
    route = request.scope["endpoint"].path
    raise HTTPError(404, f"{route} is not there: {FOREIGN_ROUTES[route]}.")


ROUTES = [Route(path, refuse, methods=("GET", "POST"), documented=False) for path in FOREIGN_ROUTES]
