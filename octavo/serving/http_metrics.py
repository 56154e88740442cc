"""`count_request`: counts and times HTTP requests. Called by `middleware.request_log`, the outermost layer.

All labels come from closed sets, whatever clients send: paths are those of routes.
"""

from starlette.types import Scope

from octavo.metrics.collection import Collection

_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
_SILENT = frozenset(("/metrics", "/health", "/ready", "/ping", "/version", "/load"))
"""What only machines ask for, again and again."""


def count_request(series: Collection, scope: Scope, status: int, duration_s: float) -> None:
    """Count a request that is over. status: 0 when its client left before the answer began."""
    handler = getattr(scope.get("endpoint"), "path", "none")
    if handler in _SILENT:
        return
    method = scope["method"] if scope["method"] in _METHODS else "other"
    kind = f"{(status or 500) // 100}xx"
    series.counter("http_requests", handler=handler, method=method, status=kind).add()
    series.histogram("http_request_duration_seconds", handler=handler, method=method).observe(duration_s)
