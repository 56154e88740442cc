"""`MediaDoor`: the only way from a URL in a request to bytes: http(s), data and file, within the operator's
limits.

An address is checked behind name resolution and for each redirect, and the connection goes to that very
address: no second parser or look-up can disagree. Proxies of the environment are not used. Texts of errors
         name no address
and no path. Called on threads; waits for the network there.
"""

import http.client
import ipaddress
import re
import socket
import ssl
import stat
import threading
import time
from contextlib import closing
from pathlib import Path
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

import msgspec

from octavo.base.errors import RequestError, UnfetchedMedia
from octavo.config.media import MediaConfig

MAX_REDIRECTS = 5
_CHUNK = 64 * 1024
_REDIRECTS = (301, 302, 303, 307, 308)
_PRIVATE = "The URL leads to an address that is not public; --allow-private-media-hosts would allow it."
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_SUSPICIOUS = re.compile(r"[\x00-\x20\x7f\\]")


class MediaDoor:
    """Fetches files of one modality. Thread-safe: it keeps nothing."""

    def __init__(self, config: MediaConfig, modality: str = "image") -> None:
        self._config, self._name = config, f"{modality}_url"
        self._option = "max_video_bytes" if modality == "video" else "max_media_bytes"
        self._most: int = getattr(config, self._option)
        timeouts_s = {"video": config.video_fetch_timeout, "audio": config.audio_fetch_timeout}
        self._timeout_s = timeouts_s.get(modality, config.media_fetch_timeout)
        self._folder = Path(config.allowed_local_media_path) if config.allowed_local_media_path else None

    def fetch(self, url: str) -> bytes:
        """Return what is at `url`. Raises RequestError."""
        scheme = url[:5].lower()
        if scheme == "data:":
            return self._decode(url)
        if scheme == "file:":
            return self._read(url)
        deadline = time.monotonic() + self._timeout_s
        try:
            for _ in range(MAX_REDIRECTS + 1):
                answer = self._get(self._checked(url), deadline)
                if isinstance(answer, bytes):
                    return answer
                url = urljoin(url, answer)
        except RequestError:
            raise
        except (OSError, http.client.HTTPException, ValueError):
            limit, is_late = self._timeout_s, time.monotonic() >= deadline
            why = f"no answer within {limit:g} s" if is_late else "the connection failed"
            raise UnfetchedMedia(f"Failed to fetch media from URL: {why}.", self._name) from None
        raise UnfetchedMedia(
            f"Failed to fetch media from URL: more than {MAX_REDIRECTS} redirects.", self._name
        )

    def _decode(self, url: str) -> bytes:
        head, comma, content = url.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise RequestError("Only base64 data URLs are supported for now.", self._name)
        if len(content) * 3 // 4 > self._most + 2:
            raise self._too_large()
        try:
            return msgspec.convert(unquote(content), bytes)  # six times as fast as base64's function
        except ValueError:
            raise RequestError("The data URL holds no valid base64.", self._name) from None

    def _read(self, url: str) -> bytes:
        if self._folder is None:
            raise RequestError("Cannot load local files without `--allowed-local-media-path`.", self._name)
        refusal = RequestError("The file path must be a subpath of `--allowed-local-media-path`.", self._name)
        try:
            parts = urlsplit(url)
            path = Path(unquote(parts.path, errors="strict")).resolve(strict=True)
            if parts.netloc not in ("", "localhost") or not path.is_relative_to(self._folder.resolve()):
                raise refusal
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                raise refusal
            if status.st_size > self._most:
                raise self._too_large()
            return path.read_bytes()
        except RequestError:
            raise
        except (OSError, ValueError, RuntimeError):
            raise refusal from None

    def _checked(self, url: str) -> SplitResult:
        """Return the parts of a URL that may be asked for, as far as its text tells."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https"):
            raise RequestError("The URL must be either a HTTP, data or file URL.", self._name)
        if _SUSPICIOUS.search(url) or "@" in parts.netloc or not parts.hostname:
            raise RequestError(
                "The URL must have a plain host, without user name, backslash or space.", self._name
            )
        allowed = [name.lower() for name in self._config.allowed_media_domains]
        if allowed and parts.hostname.rstrip(".") not in allowed:
            raise RequestError(f"The URL must be from one of the allowed domains: {allowed}.", self._name)
        return parts

    def _get(self, parts: SplitResult, deadline: float) -> bytes | str:
        """Return the content, or where it has moved to."""
        connection = self._connect(parts, deadline)
        plain = connection.sock
        watch = threading.Timer(_left(deadline), lambda: plain.shutdown(socket.SHUT_RDWR))
        watch.start()  # the socket's timeout is for each byte
        try:
            target = parts.path or "/"
            target += f"?{parts.query}" if parts.query else ""
            headers = {
                "Accept": f"{self._name[:-4]}/*, */*;q=0.5",
                "Accept-Encoding": "identity",
                "User-Agent": "octavo",
            }
            connection.request("GET", target, headers=headers)
            with closing(connection.getresponse()) as answer:
                if answer.status in _REDIRECTS and (place := answer.getheader("Location")):
                    return place
                if answer.status != 200:
                    text = f"Failed to fetch media from URL: HTTP {answer.status} error"
                    raise UnfetchedMedia(text, self._name)
                content = self._body(answer)
            _left(deadline)
            return content
        finally:
            watch.cancel()
            connection.close()

    def _body(self, answer: http.client.HTTPResponse) -> bytes:
        most = self._most
        if (answer.length or 0) > most:
            raise self._too_large()
        content = bytearray()
        while chunk := answer.read1(_CHUNK):
            content += chunk
            if len(content) > most:
                raise self._too_large()
        return bytes(content)

    def _connect(self, parts: SplitResult, deadline: float) -> http.client.HTTPConnection:
        """Connect to an address of the host that has been checked."""
        host, is_secure = parts.hostname or "", parts.scheme == "https"
        port = parts.port or (443 if is_secure else 80)
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        if not self._config.allow_private_media_hosts and not all(
            is_public(str(entry[4][0])) for entry in found
        ):
            raise RequestError(_PRIVATE, self._name)
        plain = _first_connection([entry[4] for entry in found], deadline)
        connection = http.client.HTTPConnection(host, port)
        connection.sock = plain
        if is_secure:
            try:
                connection.sock = ssl.create_default_context().wrap_socket(plain, server_hostname=host)
            except OSError:
                plain.close()
                raise
        return connection

    def _too_large(self) -> RequestError:
        return RequestError(f"The file is larger than {self._option}={self._most}.", self._name)


def _first_connection(addresses: list[tuple[object, ...]], deadline: float) -> socket.socket:
    error: OSError = OSError("no address")
    for address in addresses:
        try:
            return socket.create_connection((str(address[0]), int(str(address[1]))), _left(deadline))
        except TimeoutError:
            raise
        except OSError as failed:
            error = failed
    raise error


def _left(deadline: float) -> float:
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    return left


def is_public(address: str) -> bool:
    """Return True for an address of the public Internet, whatever form hides an IPv4 address in it."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if inner is None and ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
    return ip.is_global and not ip.is_multicast and not ip.is_reserved
