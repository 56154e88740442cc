"""`Door`: the innermost layer. Before the engine has started it answers 503, then it is the application."""

from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.serving.middleware.refusal import refuse


class Door:
    """Closed until `open`."""

    def __init__(self) -> None:
        self._app: ASGIApp | None = None

    def open(self, app: ASGIApp) -> None:
        """From now on requests go to `app`."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through, or refuse it."""
        if self._app is not None:
            await self._app(scope, receive, send)
        else:
            message = "The server is starting: the model is being loaded."
            await refuse(scope, send, 503, message, {"Retry-After": "2"})
