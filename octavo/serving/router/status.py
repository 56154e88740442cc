"""`Status`: what a router answers itself: /health, /ready, /metrics and what begins with /router."""

from urllib.parse import parse_qs

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from octavo.serving.errors import HTTPError, error_response
from octavo.serving.router.servers import Servers

_JSON, _TEXT = "application/json", "text/plain; version=0.0.4"


class Status:
    """The router's own routes."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers

    def answer(self, scope: Scope, *, is_draining: bool) -> Response | None:
        """Return the answer to a request for the router itself; None if it is for a server."""
        match scope["method"], scope["path"]:
            case (("GET" | "HEAD"), "/health"):
                return Response()
            case (("GET" | "HEAD"), "/ready"):
                is_ready = not is_draining and any(map(self._servers.takes, range(len(self._servers.all))))
                return Response(status_code=200 if is_ready else 503)
            case "GET", "/metrics":
                return Response(self._metrics(), media_type=_TEXT)
            case "GET", "/router/servers":
                return Response(msgspec.json.encode(self._described()), media_type=_JSON)
            case "POST", ("/router/drain" | "/router/resume") as path:
                return self._drain(scope, is_draining=path == "/router/drain")
        return None

    def _drain(self, scope: Scope, *, is_draining: bool) -> Response:
        """Give a server nothing new, or again: ?server=URL."""
        url = "".join(parse_qs(scope["query_string"].decode("latin-1")).get("server", [])).rstrip("/")
        found = [server for server in self._servers.all if server.url == url]
        if not found:
            known = ", ".join(server.url for server in self._servers.all)
            return error_response(HTTPError(404, f"server must be one of {known}; got {url[:200]!r}."))
        found[0].is_draining = is_draining
        return Response(msgspec.json.encode(self._described()), media_type=_JSON)

    def _described(self) -> dict[str, object]:
        servers = [
            {"url": s.url, "ready": s.is_ready, "draining": s.is_draining, "open": s.num_open}
            for s in self._servers.all
        ]
        return {"servers": servers}

    def _metrics(self) -> str:
        lines = [
            "# TYPE octavo_router_server_ready gauge",
            "# TYPE octavo_router_requests_open gauge",
            "# TYPE octavo_router_retries_total counter",
            "# TYPE octavo_router_requests_total counter",
        ]
        for server in self._servers.all:
            label = f'server="{server.url}"'
            lines += [
                f"octavo_router_server_ready{{{label}}} {int(server.is_ready)}",
                f"octavo_router_requests_open{{{label}}} {server.num_open}",
                f"octavo_router_retries_total{{{label}}} {server.num_retried}",
            ]
            for status, count in sorted(server.num_answers.items()):
                lines.append(f'octavo_router_requests_total{{{label},status="{status}"}} {count}')
        return "\n".join(sorted(lines, key=lambda line: line.split("{")[0].removeprefix("# TYPE "))) + "\n"
