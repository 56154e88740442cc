"""The layers between network and routes, one by one, as raw ASGI; the application behind them is a stub."""

import asyncio
import dataclasses
import hashlib
import json
import logging

import pytest
from starlette.types import Message

from octavo.config.secret import Secret
from octavo.config.server import ServerConfig
from octavo.serving.middleware.drain import Drain
from octavo.serving.middleware.hosts import HostCheck
from octavo.serving.middleware.keys import KeyCheck
from octavo.serving.middleware.request_log import RequestLog
from octavo.serving.middleware.stack import build_stack

KEYS = [Secret.of("first-key"), Secret.of("second-key")]


@dataclasses.dataclass
class Answer:
    status: int
    headers: dict
    content: bytes
    scope: dict

    @property
    def is_through(self):
        return self.content == b"through"

    @property
    def error(self):
        return json.loads(self.content)["error"]


async def through(scope, receive, send):
    """The application."""
    scope["seen"] = True
    if scope["type"] == "websocket":
        await send({"type": "websocket.accept"})
    else:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"through"})


def make_scope(path="/v1/models", method="GET", kind="http", **headers):
    lines = {"host": "localhost:8000"} | {name.replace("_", "-"): value for name, value in headers.items()}
    return {
        "type": kind,
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "http_version": "1.1",
        "client": ("127.0.0.1", 1234),
        "headers": [
            (name.encode(), value.encode("latin-1")) for name, value in lines.items() if value is not None
        ],
        "state": {},
        "extensions": {"websocket.http.response": {}},
    }


async def ask(app, scope=None, messages=(), **options):
    """What the application answers to one request."""
    scope = scope or make_scope(**options)
    incoming, outgoing = list(messages) or [{"type": "http.request", "body": b""}], []

    async def receive() -> Message:
        return incoming.pop(0)

    async def send(message: Message) -> None:
        outgoing.append(message)

    await app(scope, receive, send)
    if outgoing[0]["type"] == "websocket.accept":
        return Answer(101, {}, b"through", scope)
    start = outgoing[0]
    return Answer(
        start["status"],
        {name.decode(): value.decode() for name, value in start["headers"]},
        b"".join(message.get("body", b"") for message in outgoing[1:]),
        scope,
    )


class TestHosts:
    @pytest.mark.parametrize(
        "host",
        ["localhost", "localhost:8000", "127.0.0.1:1", "[::1]:8000", "10.1.2.3", "a.localhost", "LOCALHOST."],
    )
    async def test_names_that_can_only_mean_this_machine(self, host):
        assert (await ask(HostCheck(through, ServerConfig(), is_loopback=True), host=host)).is_through

    @pytest.mark.parametrize(
        "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "", "[::1", "1.2"]
    )
    async def test_other_names_on_a_loopback_address(self, host):
        answer = await ask(HostCheck(through, ServerConfig(), is_loopback=True), host=host)
        assert (answer.status, answer.error["param"]) == (403, "Host")
        assert "seen" not in answer.scope

    @pytest.mark.parametrize("is_loopback", [True, False])
    @pytest.mark.parametrize(
        "host",
        ["x@localhost", "evil.example@localhost:8000", "localhost/x", "localhost?x", "localhost#x", "a b"],
    )
    async def test_what_is_more_than_a_host_and_a_port(self, host, is_loopback):
        answer = await ask(HostCheck(through, ServerConfig(), is_loopback=is_loopback), host=host)
        assert (answer.status, answer.error["param"]) == (400, "Host")
        assert "seen" not in answer.scope

    async def test_names_that_the_operator_allows(self):
        config = ServerConfig(allowed_hosts=["chat.Example"])
        assert (await ask(HostCheck(through, config, is_loopback=True), host="chat.example:80")).is_through
        any_host = ServerConfig(allowed_hosts=["*"])
        assert (await ask(HostCheck(through, any_host, is_loopback=True), host="evil.example")).is_through
        assert (
            await ask(HostCheck(through, ServerConfig(), is_loopback=False), host="evil.example")
        ).is_through

    async def test_no_host_or_two(self):
        app = HostCheck(through, ServerConfig(), is_loopback=False)
        assert (await ask(app, host=None)).status == 400
        scope = make_scope()
        scope["headers"] *= 2
        assert (await ask(app, scope)).status == 400
        old = make_scope(host=None) | {"http_version": "1.0"}
        assert (await ask(app, old)).is_through

    @pytest.mark.parametrize(
        ("method", "kind", "origin", "status"),
        [
            ("POST", "http", "http://localhost:8000", 200),
            ("POST", "http", "https://localhost:8000", 200),
            ("POST", "http", "http://localhost:9999", 403),
            ("POST", "http", "null", 403),
            ("POST", "http", "https://evil.example", 403),
            ("DELETE", "http", "https://evil.example", 403),
            ("GET", "http", "https://evil.example", 200),
            ("GET", "websocket", "https://evil.example", 403),
            ("GET", "websocket", "http://localhost:8000", 101),
            ("POST", "http", None, 200),
            ("POST", "http", "https://friend.example", 200),
        ],
    )
    async def test_pages_of_other_sites(self, method, kind, origin, status):
        config = ServerConfig(allowed_origins=["https://Friend.example/"])
        app = HostCheck(through, config, is_loopback=True)
        assert (await ask(app, method=method, kind=kind, origin=origin)).status == status

    async def test_with_keys_origins_do_not_matter(self):
        app = HostCheck(through, ServerConfig(api_key=KEYS), is_loopback=True)
        assert (await ask(app, method="POST", origin="https://evil.example")).is_through


class TestKeys:
    app = KeyCheck(through, KEYS, {"/health", "/"})

    @pytest.mark.parametrize("authorization", ["Bearer first-key", "bearer second-key", "BEARER  first-key"])
    async def test_each_key_opens(self, authorization):
        assert (await ask(self.app, authorization=authorization)).is_through

    @pytest.mark.parametrize(
        "authorization",
        [
            None,
            "",
            "Bearer",
            "Bearer ",
            "first-key",
            "Basic first-key",
            "Bearer first-ke",
            "Bearer first-key2",
            "Bearer FIRST-KEY",
            "Bearer first-key,second-key",
            "Bearer " + "k" * 60_000,
            "Bearer \xff\xfe",
        ],
    )
    async def test_everything_else_does_not(self, authorization):
        answer = await ask(self.app, authorization=authorization)
        assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert (answer.error["type"], answer.error["code"]) == ("AuthenticationError", 401)
        assert "seen" not in answer.scope

    async def test_two_headers_are_none(self):
        scope = make_scope(authorization="Bearer first-key")
        scope["headers"].append((b"authorization", b"Bearer wrong"))
        assert (await ask(self.app, scope)).status == 401

    @pytest.mark.parametrize(
        ("path", "method", "status"),
        [
            ("/health", "GET", 200),
            ("/health", "HEAD", 200),
            ("/", "GET", 200),
            ("/health", "POST", 401),
            ("/health/", "GET", 401),
            ("//health", "GET", 401),
            ("/health/../v1/models", "GET", 401),
            ("/HEALTH", "GET", 401),
            ("/metrics", "GET", 401),
            ("/v1/models", "OPTIONS", 401),
            ("/nothing", "GET", 401),
        ],
    )
    async def test_what_is_open_is_listed(self, path, method, status):
        assert (await ask(self.app, path=path, method=method)).status == status

    async def test_open_below_the_root_path_too(self):
        scope = make_scope("/api/health") | {"root_path": "/api"}
        assert (await ask(self.app, scope)).is_through
        assert (await ask(self.app, make_scope("/api/health"))).status == 401

    async def test_websockets_need_a_key(self):
        assert (await ask(self.app, kind="websocket")).status == 401
        assert (await ask(self.app, path="/health", kind="websocket")).status == 401
        assert (await ask(self.app, kind="websocket", authorization="Bearer first-key")).status == 101

    async def test_who_it_was(self):
        states = [
            (await ask(self.app, authorization=f"Bearer {key}")).scope["state"]
            for key in ("first-key", "second-key")
        ]
        assert states[0]["tenant"] == hashlib.sha256(b"first-key").hexdigest()[:16]
        assert states[0]["tenant"] != states[1]["tenant"]
        assert states[0]["cache_salt"] != states[1]["cache_salt"] != ""
        alone = await ask(KeyCheck(through, KEYS[:1], ()), authorization="Bearer first-key")
        assert alone.scope["state"]["cache_salt"] == ""

    async def test_a_key_on_an_open_path_is_known_too(self):
        answer = await ask(self.app, path="/health", authorization="Bearer first-key")
        assert answer.scope["state"]["tenant"]


class TestRequestLog:
    async def test_ids(self):
        app = RequestLog(through, ServerConfig(enable_request_id_headers=True))
        for given in ("abc-1", "a|b=10.0.0.1:9/../x", "x" * 128):
            answer = await ask(app, x_request_id=given)
            assert answer.scope["state"]["request_id"] == answer.headers["x-request-id"] == given
        made = [
            (await ask(app, x_request_id=given)).scope["state"]["request_id"]
            for given in (None, "", "x" * 129, "a b", "\x07", "\xe9")
        ]
        assert len(set(made)) == len(made)
        assert all(len(request_id) == 32 for request_id in made)
        assert "x-request-id" not in (await ask(RequestLog(through, ServerConfig()))).headers

    async def test_a_line_without_secrets(self, caplog):
        logging.getLogger("octavo").propagate = True
        app = RequestLog(through, ServerConfig())
        with caplog.at_level(logging.INFO):
            scope = make_scope("/v1/mo", authorization="Bearer hidden-key") | {
                "query_string": b"key=hidden-query"
            }
            scope["raw_path"] = b"/v1/mo\xff?key=hidden-query"
            await ask(app, scope)
            await ask(app, path="/health")
            await ask(app, path="/x" * 5000)
        lines = [record.getMessage() for record in caplog.records]
        assert lines[0].startswith("127.0.0.1:1234 GET /v1/mo\\xff 200 ")
        assert "hidden" not in "".join(lines)
        assert len(lines) == 2, "probes are not logged"
        assert len(lines[1]) < 400

    async def test_no_line_when_not_wanted_and_one_when_the_application_fails(self, caplog):
        async def fail(scope, receive, send):
            raise RuntimeError("it broke")

        logging.getLogger("octavo").propagate = True
        with caplog.at_level(logging.INFO):
            await ask(RequestLog(through, ServerConfig(disable_access_log=True)))
            assert not caplog.records
            with pytest.raises(RuntimeError):
                await ask(RequestLog(fail, ServerConfig()))
        assert [" 0 " in record.getMessage() for record in caplog.records] == [True]


class TestDrain:
    async def test_open_requests_are_counted_and_waited_for(self):
        go_on = asyncio.Event()

        async def slow(scope, receive, send):
            await go_on.wait()
            await through(scope, receive, send)

        drain = Drain(slow)
        running = asyncio.create_task(ask(drain))
        await asyncio.sleep(0)
        assert drain.num_open == 1
        drain.begin()
        done = asyncio.create_task(drain.wait())
        late = await ask(drain, path="/ready")
        assert (late.status, late.headers["retry-after"], late.headers["connection"]) == (503, "5", "close")
        await asyncio.sleep(0.05)
        assert not done.done()
        go_on.set()
        assert (await running).is_through
        await asyncio.wait_for(done, 1)
        assert drain.num_open == 0

    async def test_probes_are_answered_to_the_end(self):
        drain = Drain(through)
        drain.begin()
        for path in ("/health", "/metrics", "/version", "/load", "/ping"):
            answer = await ask(drain, path=path)
            assert answer.is_through
            assert answer.scope["state"]["is_draining"]
        assert (await ask(drain, kind="websocket")).status == 503

    async def test_a_small_body_is_read_before_the_refusal(self):
        drain = Drain(through)
        drain.begin()
        messages = [
            {"type": "http.request", "body": b"ab", "more_body": True},
            {"type": "http.request", "body": b"c", "more_body": False},
        ]
        assert (await ask(drain, method="POST", content_length="3", messages=messages)).status == 503

    async def test_a_socket_at_rest_is_not_waited_for_and_gets_no_further_request(self):
        asked = asyncio.Queue()
        heard = []

        async def converse(scope, receive, send):
            while True:
                scope["state"]["is_at_rest"] = True
                message = await receive()
                heard.append(message["type"])
                if message["type"] == "websocket.disconnect":
                    return
                scope["state"]["is_at_rest"] = False
                await asyncio.sleep(0.05)

        drain = Drain(converse)
        task = asyncio.create_task(drain(make_scope(kind="websocket"), asked.get, None))
        asked.put_nowait({"type": "websocket.receive", "text": "{}"})
        await asyncio.sleep(0.01)
        assert drain.num_open == 1
        drain.begin()
        await asyncio.wait_for(drain.wait(), 1)
        assert not task.done()
        asked.put_nowait({"type": "websocket.receive", "text": "{}"})
        await asyncio.wait_for(task, 1)
        assert heard == ["websocket.receive", "websocket.disconnect"]


class TestStack:
    async def test_pages_of_allowed_origins_may_ask_without_a_key_what_they_may_ask(self):
        config = ServerConfig(api_key=KEYS, allowed_origins=["https://friend.example"])
        app = build_stack(through, config, is_loopback=True).app
        preflight = {
            "access_control_request_method": "POST",
            "access_control_request_headers": "authorization",
        }
        answer = await ask(app, method="OPTIONS", origin="https://friend.example", **preflight)
        assert answer.status == 200
        assert answer.headers["access-control-allow-origin"] == "https://friend.example"
        assert "seen" not in answer.scope
        answer = await ask(app, method="OPTIONS", origin="https://evil.example", **preflight)
        assert answer.status == 400
        refused = await ask(app, method="POST", origin="https://friend.example")
        assert refused.status == 401
        assert refused.headers["access-control-allow-origin"] == "https://friend.example"

    async def test_order(self):
        app = build_stack(through, ServerConfig(api_key=KEYS), is_loopback=True).app
        assert (await ask(app, host="evil.example")).status == 403
        assert (await ask(app)).status == 401
        answer = await ask(app, authorization="Bearer first-key")
        assert answer.is_through
        assert answer.scope["state"].keys() >= {"request_id", "tenant", "cache_salt"}
        assert (await ask(app, path="/")).is_through

    @pytest.mark.parametrize("path", ["/metrics", "/ready", "/ping", "/version", "/load"])
    async def test_monitoring_may_be_open(self, path):
        for is_open in (False, True):
            config = ServerConfig(api_key=KEYS, open_monitoring=is_open)
            app = build_stack(through, config, is_loopback=True).app
            assert (await ask(app, path=path)).is_through is is_open
            assert (await ask(app)).status == 401

    async def test_the_root_path_is_set(self):
        app = build_stack(through, ServerConfig(root_path="/api"), is_loopback=False).app
        assert (await ask(app)).scope["root_path"] == "/api"
