"""`RequestLog`: gives every request its id; when it is over, a line in the log and a place in the metrics.

The line holds method, path, status, time and id: never a query, a header or a body. Probes are logged at
DEBUG.
"""

import logging
import re
import secrets
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.base.log import get_logger
from octavo.config.server import ServerConfig
from octavo.metrics.collection import Collection
from octavo.serving.metrics_board import MetricsBoard
from octavo.serving.middleware import headers

logger = get_logger("octavo.access")
_WELL_FORMED = re.compile(r"[!-~]{1,128}")
_PROBES = {"/health", "/ready", "/ping", "/load", "/metrics"}
_LONGEST_PATH = 200
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
_SILENT = frozenset(("/metrics", "/health", "/ready", "/ping", "/version", "/load"))
"""Not counted: what only machines ask for, again and again."""


class RequestLog:
    """Sets `scope["state"]["request_id"]`: the client's X-Request-Id if it is well-formed, else a new one."""

    def __init__(self, app: ASGIApp, config: ServerConfig, board: MetricsBoard | None = None) -> None:
        """board: where requests are counted, once there is one."""
        self._app = app
        self._board = board
        self._echoes_id = config.enable_request_id_headers
        self._is_logging = not config.disable_access_log
        self._root_path = config.root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun_s, status = time.monotonic(), 0
        request_id = headers.value(scope, b"x-request-id")
        if not _WELL_FORMED.fullmatch(request_id):
            request_id = secrets.token_hex(16)
        scope.setdefault("state", {})["request_id"] = request_id
        scope["root_path"] = self._root_path

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] in ("http.response.start", "websocket.http.response.start"):
                status = message["status"]
                if self._echoes_id:
                    message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            elif message["type"] == "websocket.accept":
                status = 101
            await send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            took_s = time.monotonic() - begun_s
            if self._board is not None and scope["type"] == "http":
                count_request(self._board.http, scope, status, took_s)
            if self._is_logging:
                self._log(scope, status, took_s)

    def _log(self, scope: Scope, status: int, took_s: float) -> None:
        level = logging.DEBUG if scope["path"] in _PROBES else logging.INFO
        client = scope.get("client")
        path = scope.get("raw_path", b"").partition(b"?")[0].decode("ascii", "backslashreplace")
        logger.log(
            level,
            "%s %s %s %d %.3fs %s",
            f"{client[0]}:{client[1]}" if client else "-",
            scope.get("method", "WEBSOCKET"),
            path[:_LONGEST_PATH],
            status,
            took_s,
            scope["state"]["request_id"],
        )


def count_request(series: Collection, scope: Scope, status: int, duration_s: float) -> None:
    """Count and time a request that is over. status: 0 when its client left before the answer began.

    All labels come from closed sets, whatever clients send: paths are those of routes.
    """
    handler = getattr(scope.get("endpoint"), "path", "none")
    if handler in _SILENT:
        return
    method = scope["method"] if scope["method"] in _METHODS else "other"
    kind = f"{(status or 500) // 100}xx"
    series.counter("http_requests", handler=handler, method=method, status=kind).add()
    series.histogram("http_request_duration_seconds", handler=handler, method=method).observe(duration_s)
