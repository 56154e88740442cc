"""`HostCheck`: a browser must not be made to talk to this server by a page of somebody else's.

Two ways lead there. *DNS rebinding*: a name of the attacker's resolves to 127.0.0.1; so a server on a
loopback address answers only to names that can mean nothing else. *Requests across sites*: a page may send
simple POSTs and open WebSockets to any address; so without keys, which such a page does not know, what
carries an Origin must come from this server's own page or from `allowed_origins`.
"""

import ipaddress
import re
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.config.server import ServerConfig
from octavo.serving.errors import HTTPError, error_response
from octavo.serving.middleware import headers

_AUTHORITY = re.compile(r"[^\s@/?#\\]*")
"""What has a user, a path or a query beside the host would be read in different ways."""
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


class HostCheck:
    """Refuses 400 for a Host header that is missing or doubled, 403 for a foreign Host or Origin."""

    def __init__(self, app: ASGIApp, config: ServerConfig, *, is_loopback: bool) -> None:
        self._app = app
        self._checks_host = is_loopback and "*" not in config.allowed_hosts
        self._checks_origin = not config.api_key and "*" not in config.allowed_origins
        self._hosts = {host.lower() for host in config.allowed_hosts}
        self._origins = {origin.lower().rstrip("/") for origin in config.allowed_origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._fault(scope)
        await (self._app if error is None else error_response(error))(scope, receive, send)

    def _fault(self, scope: Scope) -> HTTPError | None:
        hosts = headers.values(scope, b"host")
        if len(hosts) != 1 and (hosts or scope.get("http_version") != "1.0"):
            return HTTPError(400, f"A request needs one Host header; found {len(hosts)}.", "Host")
        host = hosts[0].lower() if hosts else "localhost"
        if not _AUTHORITY.fullmatch(host):
            return HTTPError(400, "The Host header must be a name or an address, and a port perhaps.", "Host")
        if self._checks_host and not self._is_ours(host):
            text = "This server answers only to localhost and IP addresses as Host; see --allowed-hosts."
            return HTTPError(403, text, "Host")
        if self._checks_origin and not self._is_same_site(scope, host):
            text = "This server takes no requests from pages of other sites; see --allowed-origins."
            return HTTPError(403, text, "Origin")
        return None

    def _is_ours(self, host: str) -> bool:
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        except ValueError:
            return False
        return name in self._hosts or name == "localhost" or name.endswith(".localhost") or _is_address(name)

    def _is_same_site(self, scope: Scope, host: str) -> bool:
        if scope["type"] == "http" and scope["method"] in _SAFE_METHODS:
            return True
        ours = {f"http://{host}", f"https://{host}", *self._origins}
        return all(origin.lower() in ours for origin in headers.values(scope, b"origin"))


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
