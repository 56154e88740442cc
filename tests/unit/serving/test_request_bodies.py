"""`read_body`: what is JSON, what is too much, and who is told what."""

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.requests import Request

from octavo.base.errors import RequestError
from octavo.config.server import ServerConfig
from octavo.serving.body import parse_body, read_body
from octavo.serving.errors import ClientGone, HTTPError


class Thing(msgspec.Struct):
    name: str
    sizes: list[int] | None = None


def request(*chunks, headers=(), gone=False, **config):
    app = Starlette()
    app.state.config = ServerConfig(**config)
    messages = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
    messages.append({"type": "http.disconnect"} if gone else {"type": "http.request", "body": b""})
    given = {"content-type": "application/json", **dict(headers)}
    encoded = [(name.encode(), value.encode()) for name, value in given.items()]

    async def receive():
        return messages.pop(0)

    scope = {"type": "http", "method": "POST", "path": "/", "headers": encoded, "app": app}
    return Request(scope, receive)


async def test_a_body_in_pieces():
    assert await read_body(request(b'{"na', b'me": "x", "sizes": [1]}'), Thing) == Thing("x", [1])


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "not valid JSON"),
        (b"null", "must be a JSON object"),
        (b"[1]", "must be a JSON object"),
        (b'{"name": "x"', "not valid JSON"),
        (b'{"name": "x"} {}', "not valid JSON"),
        (b"\xef\xbb\xbf{}", "not valid JSON"),
        (b'{"name": NaN}', "not valid JSON"),
        (b'{"name": Infinity}', "not valid JSON"),
        (b'{"name": 1e400}', "not valid JSON"),
        (b'{"name": "\xff"}', "not UTF-8"),
        (b'{"name": "\\ud800"}', "not valid JSON"),
        (b"[" * 20_000, "nested too deeply"),
        (b'{"a":' * 20_000, "nested too deeply"),
        (b"{'name': 'x'}", "not valid JSON"),
    ],
)
async def test_what_is_no_json_object(content, text):
    with pytest.raises(RequestError, match=text):
        await read_body(request(content), Thing)


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({}, "name", "missing required field `name`"),
        ({"name": 5}, "name", "name: Expected `str`, got `int`"),
        ({"name": None}, "name", "got `null`"),
        ({"name": "x", "sizes": [1, True]}, "sizes", r"sizes\[1\]: Expected `int`, got `bool`"),
        ({"name": "x", "sizes": [1.0]}, "sizes", "got `float`"),
        ({"name": "x", "sizes": "1"}, "sizes", "got `str`"),
        ({"name": "x", "size": 1}, "size", "Unknown field 'size'"),
    ],
)
def test_the_field_at_fault_is_named(fields, param, text):
    with pytest.raises(RequestError, match=text) as caught:
        parse_body(msgspec.json.encode(fields), Thing, strict=True)
    assert caught.value.parameter == param


def test_unknown_fields_may_pass(caplog):
    assert parse_body(b'{"name": "x", "size": 1}', Thing, strict=False) == Thing("x")


@pytest.mark.parametrize(
    "media_type", ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]
)
async def test_only_json_is_read(media_type):
    with pytest.raises(HTTPError) as caught:
        await read_body(request(b'{"name": "x"}', headers={"content-type": media_type}.items()), Thing)
    assert caught.value.status == 415


@pytest.mark.parametrize(
    "media_type", ["application/json; charset=utf-8", "Application/JSON", "application/x+json"]
)
async def test_kinds_of_json(media_type):
    assert await read_body(request(b'{"name": "x"}', headers={"content-type": media_type}.items()), Thing)


async def test_nothing_is_unpacked():
    with pytest.raises(HTTPError) as caught:
        await read_body(request(b"{}", headers={"content-encoding": "gzip"}.items()), Thing)
    assert caught.value.status == 415


async def test_large_bodies_are_refused_unread_or_half_read():
    for headers in ({"content-length": "101"}, {}):
        asked = request(b"x" * 60, b"x" * 60, b"x" * 60, headers=headers.items(), max_request_bytes=100)
        with pytest.raises(HTTPError) as caught:
            await read_body(asked, Thing)
        assert caught.value.status == 413


async def test_a_client_that_leaves_in_the_middle():
    with pytest.raises(ClientGone):
        await read_body(request(b'{"name"', gone=True), Thing)
