"""`Endpoint`: a handler of the registry as an ASGI application, whose errors leave as answers in one form.

Made by `app`, one for each entry of a ROUTES list.
"""

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from octavo.serving.registry import Route


class Endpoint:
    """One route's handler. Starlette's router puts it into `scope["endpoint"]`."""

    def __init__(self, route: Route) -> None:
        self.path = route.path
        self._route = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = Request(scope, receive, send)
        try:
            response = await self._route.handler(request)
        except Exception as error:
            response = self._route.error_response(error)
        await response(scope, receive, send)
