"""`octavo route` before fake servers: choice, health, retries, streams, disconnects, drain, bad input."""

import asyncio
import json
import time
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import pytest

from octavo.base.errors import ConfigError
from octavo.cli.main import main
from octavo.config.router import RouterConfig, check_servers
from octavo.config.server import ServerConfig
from octavo.frontend.text.loader import load_tokenizer
from octavo.serving.process.http_server import HttpServer
from octavo.serving.process.listener import Listener
from octavo.serving.router.prompts import read_prompt
from octavo.serving.router.proxy import Proxy, open_session
from octavo.serving.router.servers import Servers
from tests.served_process import free_port


class FakeServer:
    """Answers with its name; told to, it is busy, streams for ever, or breaks off."""

    def __init__(self, name):
        self.name, self.url = name, ""
        self.mode, self.num_cancelled, self.asked = "", 0, []

    async def __call__(self, scope, receive, send):
        if scope["path"] in ("/ready", "/health"):
            status = 503 if self.mode == "down" else 200
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body"})
            return
        if scope["path"] == "/metrics":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            text = b'vllm:cache_config_info{block_size="16",num_gpu_blocks="16",engine="0"} 1.0\n'
            await send({"type": "http.response.body", "body": text})
            return
        self.asked.append((scope, (await receive())["body"]))
        status = 503 if self.mode == "busy" else 200
        headers = [(b"x-name", self.name.encode()), (b"set-cookie", b"whose=the first client's")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        if self.mode == "stream":
            leaving = asyncio.create_task(receive())
            for number in range(50):
                await send({"type": "http.response.body", "body": f"{number}\n".encode(), "more_body": True})
                done, _ = await asyncio.wait([leaving], timeout=0.05)
                if done:
                    self.num_cancelled += 1
                    return
        if self.mode == "break":
            await send({"type": "http.response.body", "body": b"half", "more_body": True})
            raise RuntimeError("it breaks")
        await send({"type": "http.response.body", "body": self.name.encode()})


@asynccontextmanager
async def running(app):
    """The address of an application."""
    config = ServerConfig(port=0)
    with Listener.open(config) as listener:
        http = HttpServer(app, config, listener.socket)
        http.start()
        yield listener.url
        await http.close(0.2)


class Routed:
    def __init__(self, servers, router, client):
        self.servers, self.router, self.client = servers, router, client

    async def names(self, count, **body):
        return [(await self.client.post("/v1/completions", json=body)).text for _ in range(count)]


@pytest.fixture
async def start():
    async with AsyncExitStack() as stack:

        async def start(count=3, **options):
            config = RouterConfig(**{"health_interval": 0.1, **options})
            servers = [FakeServer(name) for name in "abcd"[:count]]
            for server in servers:
                server.url = await stack.enter_async_context(running(server))
            session = await stack.enter_async_context(open_session(config))
            router = Servers([server.url for server in servers], config)
            proxy = Proxy(router, config, session)
            watching = asyncio.create_task(router.watch(session))
            stack.callback(watching.cancel)
            url = await stack.enter_async_context(running(proxy))
            client = await stack.enter_async_context(httpx.AsyncClient(base_url=url))
            while not all(server.is_ready for server in router.all):
                await asyncio.sleep(0.02)
            return Routed(servers, proxy, client)

        yield start


async def test_round_robin_least_load_and_sessions(start):
    routed = await start(policy="round_robin")
    assert sorted(await routed.names(6)) == list("aabbcc")
    routed = await start(policy="session")
    homes = {}
    for number in range(12):
        homes[number] = set(await routed.names(3, session_id=f"s{number}"))
    assert all(len(home) == 1 for home in homes.values())
    assert len(set.union(*homes.values())) > 1
    routed = await start(policy="least_load")
    routed.servers[0].mode = "stream"
    async with routed.client.stream("POST", "/x", json={}) as first:
        assert first.headers["x-name"] == "a"
        assert sorted(await routed.names(2)) == ["b", "c"]
        assert "a" not in await routed.names(4)


@pytest.mark.parametrize("kind", ["text", "chat", "ids"])
async def test_a_prefix_goes_where_it_has_been(start, kind):
    routed = await start()

    def body(prefix, question):
        text = f"{prefix} " * 200
        if kind == "text":
            return {"prompt": text + question}
        if kind == "ids":
            return {"prompt": [len(prefix)] * 200 + [ord(question)]}
        return {"messages": [{"role": "system", "content": text}, {"role": "user", "content": question}]}

    homes = {}
    for prefix in ("aa", "bbbb", "cccccc"):
        [homes[prefix]] = await routed.names(1, **body(prefix, "?"))
    assert sorted(homes.values()) == list("abc"), "new ones are spread"
    for question in "123":
        for prefix, home in homes.items():
            assert await routed.names(1, **body(prefix, question)) == [home]


async def test_caches_and_what_they_forget(start):
    """A server says how much its cache holds; one that comes back has forgotten all."""
    routed = await start(count=2)
    loads = routed.router._servers._placement.loads
    assert [load.cache_tokens for load in loads] == [256, 256]
    prompts = [[number] * 256 + [1] for number in range(2)]
    homes = [(await routed.names(1, prompt=prompt))[0] for prompt in prompts]
    assert sorted(homes) == ["a", "b"]
    assert [(await routed.names(1, prompt=prompt))[0] for prompt in prompts * 2] == homes * 2
    seen = routed.router._servers._placement._seen
    routed.servers[0].mode = "down"
    await asyncio.sleep(0.3)
    routed.servers[0].mode = ""
    await asyncio.sleep(0.3)
    assert [len(seen[place]) for place in range(2)] == [0, 4]


async def test_a_server_that_is_gone_or_busy_is_passed_over(start):
    routed = await start(policy="round_robin")
    routed.servers[1].mode = "busy"
    assert "b" not in await routed.names(6)
    routed.servers[1].mode = "down"
    await asyncio.sleep(0.3)
    listed = (await routed.client.get("/router/servers")).json()["servers"]
    assert [server["ready"] for server in listed] == [True, False, True]
    for server in routed.servers:
        server.mode = "busy"
    assert (await routed.client.post("/v1/completions", json={})).status_code == 503
    routed.router._servers.all[0].url = f"http://127.0.0.1:{free_port()}"  # nobody listens there
    routed.servers[2].mode = ""
    await asyncio.sleep(0.3)
    assert set(await routed.names(3)) == {"c"}
    text = (await routed.client.get("/metrics")).text
    assert "octavo_router_retries_total" in text and 'status="200"' in text


async def test_a_stream_comes_piece_by_piece_and_leaving_cancels_it(start):
    routed = await start(count=1)
    routed.servers[0].mode = "stream"
    begun_s, pieces = time.monotonic(), []
    async with routed.client.stream("POST", "/v1/chat/completions", json={}) as answer:
        async for piece in answer.aiter_text():
            pieces.append(piece)
            if len(pieces) == 3:
                break
    assert time.monotonic() - begun_s < 1.5, "nothing is held back"
    async with asyncio.timeout(5):
        while not routed.servers[0].num_cancelled:
            await asyncio.sleep(0.02)
    while routed.router.num_open:
        await asyncio.sleep(0.02)
    assert [server.num_open for server in routed.router._servers.all] == [0]


async def test_requests_pass_as_they_are(start):
    """No cookie of another client, no header that the client has not sent (servers would compress for it)."""
    routed = await start(count=1)
    for server in routed.router._servers.all:
        server.url = server.url.replace("127.0.0.1", "localhost")  # cookies of addresses are ignored anyway
    bare = [("x-mine", "1"), ("cookie", "mine=2"), ("host", "a")]
    for _ in range(2):
        request = httpx.Request("POST", f"{routed.client.base_url}/v1/x", headers=bare, content=b"{}")
        answer = await routed.client.send(request)
        assert answer.headers["set-cookie"] == "whose=the first client's"
        routed.client.cookies.clear()
    for scope, body in routed.servers[0].asked:
        sent = [(key, value) for key, value in scope["headers"] if key not in (b"host", b"content-length")]
        assert body == b"{}" and sent == [(b"x-mine", b"1"), (b"cookie", b"mine=2")]


async def test_an_answer_that_has_begun_is_not_begun_again(start):
    routed = await start(count=2, policy="round_robin")
    for server in routed.servers:
        server.mode = "break"
    with pytest.raises(httpx.RemoteProtocolError):
        await routed.client.post("/v1/completions", json={})
    assert sum(len(server.asked) for server in routed.servers) == 1


async def test_drain_of_a_server_and_bad_input(start):
    routed = await start(policy="round_robin", max_request_bytes=1000, upstream_api_key="inner")
    url = routed.servers[0].url
    assert (await routed.client.post(f"/router/drain?server={url}")).json()["servers"][0]["draining"]
    assert set(await routed.names(4)) == {"b", "c"}
    headers = dict(routed.servers[1].asked[0][0]["headers"])
    assert headers[b"authorization"] == b"Bearer inner"
    await routed.client.post(f"/router/resume?server={url}")
    assert "a" in await routed.names(3)
    assert (await routed.client.post("/router/drain?server=x")).status_code == 404
    assert (await routed.client.post("/x", content=b"x" * 1001)).status_code == 413
    assert (await routed.client.post("/x", content=b"\xff{")).status_code == 200, "a server will judge it"


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"1", b'{"prompt": 3}', b'{"messages": [{"content": null}]}', b"\xff"]
)
def test_any_body_is_read(body):
    assert read_prompt(body).num_tokens in (0, 1)


@pytest.mark.parametrize(
    ("urls", "text"), [([], "Which"), (["x"], "address"), (["http://a", "http://a/"], "twice")]
)
def test_servers_that_cannot_be(urls, text):
    with pytest.raises(ConfigError, match=text):
        check_servers(urls)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", 99999),
        ("port", -5),
        ("health_interval", -1.0),
        ("health_interval", float("nan")),
        ("connect_timeout", 0.0),
        ("max_request_bytes", 0),
    ],
)
def test_options_that_cannot_be(name, value, capsys):
    flag = f"--{name.replace('_', '-')}={value}"
    assert main(["route", "http://127.0.0.1:1", flag]) == 2
    assert f"{name} must be" in capsys.readouterr().err


def test_prefixes_are_those_of_the_rendered_tokens(smollm2_path):
    """What a template writes between texts counts; characters that look alike do not."""
    tokenizer = load_tokenizer(smollm2_path)
    long = "The quick brown fox jumps over the lazy dog. " * 30

    def ask(*contents, **fields):
        messages = [
            {"role": role, "content": content} for role, content in zip("su" * 9, contents, strict=False)
        ]
        names = {"s": "system", "u": "user"}
        messages = [message | {"role": names[message["role"]]} for message in messages]
        return read_prompt(json.dumps({"messages": messages, **fields}).encode(), tokenizer)

    first, second = ask(long, "One?"), ask(long, "Quite another question?")
    shared = [a for a, b in zip(first.beginnings, second.beginnings, strict=False) if a == b]
    ids = tokenizer.apply_chat_template([{"role": "system", "content": long}], add_generation_prompt=False)
    assert len(shared) == len(ids) // 64 >= 4 and first.num_tokens > len(ids)
    assert ask(long, "One?").beginnings == first.beginnings
    assert not set(ask("x" + long, "One?").beginnings) & set(first.beginnings)
    assert not set(ask(long, "One?", model="other").beginnings) & set(first.beginnings)
    as_ids = read_prompt(json.dumps({"prompt": tokenizer.encode(long)}).encode(), tokenizer)
    as_text = read_prompt(json.dumps({"prompt": long}).encode(), tokenizer)
    assert as_ids.beginnings == as_text.beginnings, "one beginning, however it is told"
    for body in (b"", b"[]", b'{"prompt": 3}', b'{"messages": [{"content": null}]}', b'{"messages": [1]}'):
        assert read_prompt(body, tokenizer).num_tokens < 20
    begun_s = time.perf_counter()
    for number in range(20):
        ask(long, f"Question {number}?")
    assert (time.perf_counter() - begun_s) / 20 < 0.01
