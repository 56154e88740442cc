"""`read_body`: what is JSON, what is too much, and who is told what."""

import threading

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.requests import Request

from octavo.base.errors import Overloaded, RequestError
from octavo.config.server import ServerConfig
from octavo.serving.body import parse_body, read_body
from octavo.serving.body_budget import BodyBudget, body_budget
from octavo.serving.errors import ClientGone, HTTPError


class Thing(msgspec.Struct):
    name: str
    sizes: list[int] | None = None


def request(*chunks, headers=(), gone=False, **config):
    app = Starlette()
    app.state.config = ServerConfig(**config)
    app.state.bodies = body_budget(app.state.config)
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


KEYS = ", ".join(f'"k{n}" : 1' for n in range(70_000))
MANY = {
    "keys": f'{{"name": "x", {KEYS}}}',
    "keys of an inner object": f'{{"name": {{{KEYS}}}}}',
    "objects": '{"name": [' + "{}, " * 70_000 + "1]}",
    "lists": '{"name": [' + "[], " * 70_000 + "1]}",
    "behind a text with quotes": '{"name": "\\\\\\"", "x": [' + "{}," * 70_000 + "1]}",
    "texts": '{"name": [' + '"[",' * 1_050_000 + "1]}",
    "values": '{"name": "x", "sizes": [' + "1," * 1_050_000 + "1]}",
}


@pytest.mark.parametrize("name", MANY)
async def test_a_body_of_very_many_parts_is_refused_before_it_becomes_objects(name, monkeypatch):
    monkeypatch.setattr("msgspec.json.decode", None)
    with pytest.raises(RequestError, match="more than 65536 keys, objects and lists, or more than 1048576"):
        await read_body(request(MANY[name].encode()), Thing)
    with pytest.raises(RequestError, match="more than 65536"):
        parse_body(MANY[name], Thing, strict=True)


@pytest.mark.parametrize("text", ['{"a": [1, 2]}, ' * 300_000, '\\"' * 300_000, "\\\\" * 300_000])
async def test_a_long_text_may_look_like_anything(text):
    content = msgspec.json.encode(Thing(text + ",:[{" * 300_000))
    assert await read_body(request(content), Thing) == Thing(text + ",:[{" * 300_000)


async def test_large_bodies_are_parsed_on_a_thread(monkeypatch):
    threads, decode = [], msgspec.json.decode

    def noted(content):
        threads.append(threading.current_thread())
        return decode(content)

    monkeypatch.setattr("msgspec.json.decode", noted)
    for size in (10, 70_000):
        content = msgspec.json.encode(Thing("x" * size))
        assert await read_body(request(content), Thing) == Thing("x" * size)
    with pytest.raises(RequestError, match="Expected `str`"):
        await read_body(request(b'{"name": [' + b"1, " * 70_000 + b"1]}"), Thing)
    here = threading.current_thread()
    assert [thread is here for thread in threads] == [True, False, False]


async def test_bodies_on_their_way_have_a_budget():
    budget = BodyBudget(1_000_000, "max_pending_body_bytes", 800_000)
    whole = b'{"name": "' + b"x" * 600_000 + b'"}'

    def asked(*chunks, gone=False):
        asked = request(*chunks, gone=gone)
        asked.app.state.bodies = budget
        return asked

    with budget.open(request()) as grow_to:
        grow_to(65_536)
        assert budget.num_bytes == 0, "the beginning of a body is free"
        grow_to(565_536)
        with pytest.raises(HTTPError, match="max_pending_body_bytes") as refused:
            await read_body(asked(whole[:300_000], whole[300_000:]), Thing)
        assert (refused.value.status, refused.value.headers["Retry-After"]) == (503, "1")
        assert budget.num_bytes == 500_000
        assert await read_body(asked(b'{"name": "x"}'), Thing) == Thing("x")
        with pytest.raises(ClientGone):
            await read_body(asked(whole[:300_000], gone=True), Thing)
        assert budget.num_bytes == 500_000
    assert (await read_body(asked(whole), Thing)).name == "x" * 600_000
    assert budget.num_bytes == 0


def sent_by(host="", tenant=""):
    asked = request()
    asked.scope |= {"client": (host, 1) if host else None, "state": {"tenant": tenant} if tenant else {}}
    return asked


def test_one_sender_who_never_ends_leaves_a_part_of_the_budget_to_others():
    budget = body_budget(ServerConfig(max_pending_body_bytes=1_000_000, max_request_bytes=400_000))
    for greedy, other in [
        (sent_by("10.0.0.1"), sent_by("10.0.0.2")),
        (sent_by("10.0.0.1", "a"), sent_by("10.0.0.1", "b")),
        (sent_by(), sent_by("10.0.0.1")),
    ]:
        with budget.open(greedy) as first, budget.open(greedy) as second, budget.open(other) as others:
            first(400_000)
            with pytest.raises(HTTPError, match="500000 of one sender"):
                second(400_000)
            others(400_000)
    assert budget.num_bytes == 0 and not budget._by_sender


@pytest.mark.parametrize(("close", "num_read"), [("close", 4), ("keep-alive", 0)])
async def test_a_full_engine_reads_no_more_than_a_body_may_have(close, num_read):
    """It reads at all because closing on unread data would take the answer from the client."""

    class Full:
        def of(self):
            return self

        def check_admission(self):
            raise Overloaded("full", 1.0)

    asked = request(*[b"x" * 400] * 10, headers={"connection": close}, max_request_bytes=1500)
    asked.app.state.engines = Full()
    received, receive = [], asked._receive

    async def noted():
        received.append(await receive())
        return received[-1]

    asked._receive = noted
    with pytest.raises(Overloaded):
        await read_body(asked, Thing, takes_place=True)
    assert len(received) == num_read
