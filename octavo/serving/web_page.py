"""GET /, /docs and /web/…: the page of chat and dashboard, and that of the API, as the files of `web/` are.

The same for everybody and without any data, so that it can be had without a key, which is typed into it. It
may load nothing from elsewhere, run no script but its own, and make no markup of text: the browser is told to
hold it to that.
"""

from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from starlette._utils import get_route_path
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from octavo.config.server import ServerConfig
from octavo.serving.registry import Route

_FOLDER = Path(__file__).with_name("web")
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_NAMES = frozenset(path.name for path in _FOLDER.iterdir() if path.suffix in _MEDIA_TYPES)
_PAGES = {"/": "index.html", "/docs": "docs.html"}
"""The page of chat and dashboard, and that of the API."""
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
OPEN_PATHS = frozenset({*_PAGES, *(f"/web/{name}" for name in _NAMES)})
"""What may be read without a key."""


class _File(NamedTuple):
    content: bytes
    headers: dict[str, str]


async def web_file(request: Request) -> Response:
    """A page, or a file of one."""
    config: ServerConfig = request.app.state.config
    name = request.path_params.get("name") or _PAGES[get_route_path(request.scope)]
    if config.disable_page or name not in _NAMES:
        raise HTTPException(404)
    content, headers = _read(name)
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers)


@cache
def _read(name: str) -> _File:
    path = _FOLDER / name
    content = path.read_bytes()
    own = {"Content-Type": _MEDIA_TYPES[path.suffix], "ETag": f'"{sha256(content).hexdigest()[:16]}"'}
    return _File(content, _HEADERS | own)


ROUTES = [Route(path, web_file, documented=False) for path in (*_PAGES, "/web/{name}")]
