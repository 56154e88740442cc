"""The door for media: what it lets in, and what it refuses without telling an address or a path."""

import base64
import socket
import threading
import time
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from octavo.base.errors import RequestError
from octavo.config.media import MediaConfig
from octavo.frontend.media.door import MediaDoor, is_public

CONTENT = b"a picture"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        place, _, argument = self.path[1:].partition("/")
        if place == "to":
            self.send_response(302)
            self.send_header("Location", argument)
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif place == "status":
            self.send_error(int(argument))
        elif place == "slow":
            self.send_response(200)
            self.end_headers()
            for _ in range(50):
                self.wfile.write(b"x")
                self.wfile.flush()
                time.sleep(0.1)
        elif place == "large":
            self.send_response(200)
            self.end_headers()
            self.close_connection = True
            for _ in range(64):
                self.wfile.write(bytes(64 * 1024))
        else:
            self.send_response(200)
            self.send_header("Content-Length", str(len(CONTENT)))
            self.end_headers()
            self.wfile.write(CONTENT)

    def handle(self):
        with suppress(OSError):
            super().handle()


@pytest.fixture(scope="module")
def port():
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def open_door(**options):
    return MediaDoor(MediaConfig(allow_private_media_hosts=True, **options))


@contextmanager
def refused(text="."):
    with pytest.raises(RequestError, match=text) as caught:
        yield
    told = str(caught.value)
    assert "127.0.0.1" not in told and "/tmp" not in told and "0x" not in told


def test_fetches(port):
    assert open_door().fetch(f"http://127.0.0.1:{port}/picture") == CONTENT
    assert open_door().fetch(f"http://127.0.0.1:{port}/to//picture") == CONTENT


SPELLINGS = [
    "http://127.0.0.1:{port}/",
    "http://127.1:{port}/",
    "http://2130706433:{port}/",
    "http://0x7f000001:{port}/",
    "http://0177.0.0.1:{port}/",
    "http://0x7f.0.0.1:{port}/",
    "http://localhost:{port}/",
    "http://localhost.:{port}/",
    "http://[::1]:{port}/",
    "http://[::ffff:127.0.0.1]:{port}/",
    "http://[::ffff:7f00:1]:{port}/",
    "http://0.0.0.0:{port}/",
    "http://user@127.0.0.1:{port}/",
    "http://example.com\\@127.0.0.1:{port}/",
    "http://example.com@127.0.0.1:{port}/",
    "HTTP://127.0.0.1:{port}/",
    "http://127.0.0.1:{port}\t/",
]


@pytest.mark.parametrize("url", SPELLINGS)
def test_this_machine_is_refused(port, url):
    with refused():
        MediaDoor(MediaConfig()).fetch(url.format(port=port))


def test_names_that_lead_here_are_refused(port, monkeypatch):
    """Whatever a name is: its addresses count."""
    answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **options: answer)
    with refused("not public"):
        MediaDoor(MediaConfig()).fetch(f"http://pictures.example.com:{port}/")


def test_redirects_are_checked(port, monkeypatch):
    """The first address may be asked, the second not."""
    checked = []

    def is_first(address):
        checked.append(address)
        return len(checked) == 1

    monkeypatch.setattr("octavo.frontend.media.door.is_public", is_first)
    with refused("not public"):
        MediaDoor(MediaConfig()).fetch(f"http://127.0.0.1:{port}/to/http://127.0.0.1:{port}/picture")
    assert len(checked) == 2
    with refused("either a HTTP"):
        open_door().fetch(f"http://127.0.0.1:{port}/to/file:///etc/passwd")
    with refused("redirects"):
        open_door().fetch(f"http://127.0.0.1:{port}/to/" + "/to/" * 8 + "picture")


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        *((a, True) for a in ("8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8")),
        *((a, False) for a in ("10.0.0.1", "192.168.1.1", "172.16.0.1", "169.254.169.254", "100.64.0.1")),
        *((a, False) for a in ("::1", "fe80::1", "fe80::1%eth0", "fd00::1", "::ffff:10.0.0.1", "ff02::1")),
        *((a, False) for a in ("224.0.0.1", "240.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "::")),
    ],
)
def test_public_addresses(address, expected):
    assert is_public(address) is expected


def test_allowed_domains(port):
    door = open_door(allowed_media_domains=["localhost"])
    assert door.fetch(f"http://localhost:{port}/") == CONTENT
    with pytest.raises(RequestError, match="The URL must be from one of the allowed domains"):
        door.fetch(f"http://127.0.0.1:{port}/")


def test_limits(port):
    with refused("HTTP 404 error"):
        open_door().fetch(f"http://127.0.0.1:{port}/status/404")
    with refused("max_media_bytes=1048576"):
        open_door(max_media_bytes=2**20).fetch(f"http://127.0.0.1:{port}/large")
    began = time.monotonic()
    with refused("no answer within 0.5 s"):
        open_door(media_fetch_timeout=0.5).fetch(f"http://127.0.0.1:{port}/slow")
    assert time.monotonic() - began < 3


def test_data_urls():
    door = MediaDoor(MediaConfig(max_media_bytes=100))
    encoded = base64.b64encode(CONTENT).decode()
    assert door.fetch(f"data:image/png;base64,{encoded}") == CONTENT
    with refused("Only base64 data URLs are supported for now."):
        door.fetch("data:image/svg+xml,<svg/>")
    for text in ("??", "QUJD\n", "QUI", "QU=JD", "QUJD-_==", "\u00e9", "\udc80", "QUI=QUI="):
        with refused("no valid base64"):
            door.fetch(f"data:image/png;base64,{text}")
    with refused("max_media_bytes"):
        door.fetch("data:image/png;base64," + "A" * 1000)


def test_local_files(tmp_path):
    folder, outside = tmp_path / "media", tmp_path / "secret"
    folder.mkdir()
    outside.write_bytes(b"secret")
    (folder / "a b.png").write_bytes(CONTENT)
    (folder / "link").symlink_to(outside)
    with refused("Cannot load local files without `--allowed-local-media-path`."):
        MediaDoor(MediaConfig()).fetch(f"file://{folder}/a.png")
    door = MediaDoor(MediaConfig(allowed_local_media_path=str(folder)))
    assert door.fetch(f"file://{folder}/a%20b.png") == CONTENT
    for path in ("link", "../secret", "%2e%2e/secret", "missing", "", "a%00"):
        with refused("must be a subpath of"):
            door.fetch(f"file://{folder}/{path}")
    with refused("must be a subpath of"):
        door.fetch("file:///etc/passwd")
    with refused("must be a subpath of"):
        door.fetch("file:///dev/zero")
