"""The page's files: how they are served, and that they ask nobody else for anything."""

import re
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.testclient import TestClient

from octavo.config.server import ServerConfig
from octavo.serving import web_page as page

FOLDER = Path(page.__file__).with_name("web")


def client(**options):
    app = Starlette(routes=[Route(route.path, route.handler) for route in page.ROUTES])
    app.state.config = ServerConfig(**options)
    return TestClient(app)


def test_every_file_is_served_and_no_other():
    assert {"/", "/docs", *(f"/web/{path.name}" for path in FOLDER.iterdir())} == page.OPEN_PATHS
    names = {"/": "index.html", "/docs": "docs.html"}
    web = client()
    for path in sorted(page.OPEN_PATHS):
        answer = web.get(path)
        assert answer.status_code == 200, path
        assert answer.content == (FOLDER / (names.get(path) or path.removeprefix("/web/"))).read_bytes()
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert web.get("/").headers["content-type"] == "text/html; charset=utf-8"
    assert web.get("/web/app.js").headers["content-type"] == "text/javascript; charset=utf-8"


@pytest.mark.parametrize("name", ["nothing.js", "%2e%2e%2fpage.py", "%2fetc%2fpasswd", "__init__.py"])
def test_nothing_else_of_the_package_is(name):
    assert client().get(f"/web/{name}").status_code == 404


def test_the_policy_allows_nothing_from_elsewhere():
    policy = dict(
        part.split(" ", 1) for part in client().get("/").headers["content-security-policy"].split("; ")
    )
    assert policy["default-src"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "img-src", "connect-src")} == {"'self'"}
    assert policy["require-trusted-types-for"] == "'script'"


def test_a_known_file_is_not_sent_again():
    first = client().get("/web/chat.js")
    again = client().get("/web/chat.js", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_the_page_can_be_switched_off():
    web = client(disable_page=True)
    assert {web.get(path).status_code for path in page.OPEN_PATHS} == {404}


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.name)
def test_no_markup_of_text_and_no_address_of_others(path):
    text = path.read_text(encoding="utf-8")
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text
    )
    allowed = ("http://www.w3.org/",)  # names of languages, not addresses
    assert [
        url for url in re.findall(r"https?://[\w.][^\s\"'`)]*", text) if not url.startswith(allowed)
    ] == []
    assert not re.search(r"""(src|href)="/""", text), "addresses are relative, for servers behind a path"


def test_the_page_is_small():
    """Without /docs, in bytes."""
    assert sum(path.stat().st_size for path in FOLDER.iterdir() if path.stem != "docs") < 206_000
