"""`HttpMetrics`: counts and times every HTTP request, as the outermost layer of the app.

All labels come from closed sets, whatever clients send: paths are those of routes.
"""

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.serving.metrics_board import MetricsBoard

_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
_SILENT = frozenset(("/metrics", "/health", "/ready", "/ping", "/version", "/load"))
"""What only machines ask for, again and again."""


class HttpMetrics:
    """ASGI app around another."""

    def __init__(self, app: ASGIApp, board: MetricsBoard) -> None:
        self._app = app
        self._series = board.http

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count the request when it is over, also when its client has left before."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s = time.perf_counter()
        status = 500

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            self._count(scope, status, time.perf_counter() - started_s)

    def _count(self, scope: Scope, status: int, duration_s: float) -> None:
        handler = getattr(scope.get("endpoint"), "path", "none")
        if handler in _SILENT:
            return
        method = scope["method"] if scope["method"] in _METHODS else "other"
        kind = f"{status // 100}xx"
        self._series.counter("http_requests", handler=handler, method=method, status=kind).add()
        self._series.histogram("http_request_duration_seconds", handler=handler, method=method).observe(
            duration_s
        )
