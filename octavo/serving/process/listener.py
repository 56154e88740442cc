"""`Listener`: the socket on which the server listens, opened before anything is loaded.

Opened by `octavo serve`, used by `http_server`, inherited by further API processes. Light to import, so
that a port in use is told within a second.
"""

import errno
import ipaddress
import os
import socket
from pathlib import Path
from typing import Self

from octavo.base.errors import ConfigError
from octavo.base.log import get_logger
from octavo.config.server import ServerConfig

logger = get_logger(__name__)
_BACKLOG = 2048
_CAUSES = {
    errno.EADDRINUSE: "is in use: stop what listens there, or choose another with --port (0 = any free one)",
    errno.EACCES: "may not be used by this user: ports below 1024 belong to root; choose another with --port",
    errno.EADDRNOTAVAIL: "does not belong to this machine: see --host",
}


class Listener:
    """A listening socket; a context manager that closes it, and removes the file of a Unix socket."""

    def __init__(self, sock: socket.socket, config: ServerConfig) -> None:
        self.socket = sock
        self._path = Path(config.uds) if config.uds else None
        self._host = config.host
        self._scheme = "https" if config.ssl_certfile else "http"

    @classmethod
    def open(cls, config: ServerConfig) -> Self:
        """Bind and listen. Raises ConfigError for an address that cannot or must not be used."""
        return cls(_open_unix(config.uds) if config.uds else _open_tcp(config), config)

    @classmethod
    def inherited(cls, fd: int, config: ServerConfig) -> Self:
        """The socket that a parent process has opened; its file is the parent's to remove."""
        listener = cls(socket.socket(fileno=fd), config)
        listener.socket.setblocking(False)
        listener._path = None
        return listener

    @property
    def is_loopback(self) -> bool:
        """Whether it is a TCP address that only this machine can reach."""
        return self.socket.family != socket.AF_UNIX and _is_loopback(self.socket.getsockname()[0])

    @property
    def url(self) -> str:
        """What a client on this machine would call; for a Unix socket, its path."""
        name = self.socket.getsockname()
        if self.socket.family == socket.AF_UNIX:
            return f"unix:{name}"
        any_address = ipaddress.ip_address(name[0]).is_unspecified
        host = "127.0.0.1" if any_address else self._host
        return f"{self._scheme}://{f'[{host}]' if ':' in host else host}:{name[1]}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def _open_tcp(config: ServerConfig) -> socket.socket:
    place = f"{config.host}:{config.port}"
    try:
        found = socket.getaddrinfo(
            config.host or None, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--host {config.host!r} is no address: {error}.") from error
    family, kind, protocol, _, address = min(found, key=lambda info: info[0] != socket.AF_INET)
    _check_reach(str(address[0]), config)
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        cause = _CAUSES.get(error.errno or 0, f"cannot be used: {error.strerror}")
        raise ConfigError(f"Port {place} {cause}.") from error
    return sock


def _open_unix(path: str) -> socket.socket:
    """Only the owner of the file may connect. What a dead server has left is replaced."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        if Path(path).is_socket() and sock.connect_ex(path) == errno.ECONNREFUSED:
            Path(path).unlink()
        sock.close()
        sock = socket.socket(socket.AF_UNIX)
        mask = os.umask(0o177)
        try:
            sock.bind(path)
        finally:
            os.umask(mask)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        in_use = error.errno == errno.EADDRINUSE
        cause = "is in use, or a file of that name exists" if in_use else f"cannot be used: {error}"
        raise ConfigError(f"--uds {path} {cause}.") from error
    return sock


def _check_reach(address: str, config: ServerConfig) -> None:
    """Whoever reaches a server without a key may use it: that must be wanted."""
    if _is_loopback(address) or config.api_key or config.ssl_cert_reqs == 2:
        return
    text = f"Everyone who reaches {config.host}:{config.port} can use this server: there is no key."
    if not config.insecure:
        raise ConfigError(f"{text} Give one with --api-key, listen on 127.0.0.1, or say --insecure.")
    logger.warning("INSECURE: %s", text)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
