"""Health and the operator's verbs, over the whole application without its middleware."""

import dataclasses
from contextlib import contextmanager

import httpx
import pytest

from octavo.config.secret import Secret
from octavo.frontend.observe.health import Health
from octavo.serving.middleware.stack import build_stack
from octavo.version import __version__
from tests.serving import served

pytestmark = pytest.mark.asyncio(loop_scope="module")
VERBS = ["/pause", "/resume", "/sleep", "/wake_up", "/abort", "/abort_requests", "/reset_prefix_cache"]
VERBS += ["/scale_elastic_ep"]
VERBS += ["/reset_mm_cache", "/reset_encoder_cache", "/collective_rpc", "/start_profile", "/stop_profile"]


@contextmanager
def configured(server, **options):
    before = server.app.state.config
    server.app.state.config = dataclasses.replace(before, **options)
    yield server.app.state.config
    server.app.state.config = before


@pytest.fixture
def as_operator(server):
    """The client of a server in dev mode."""
    with configured(server, dev_mode=True, api_key=[Secret.of("hidden-key")]):
        yield server.client


async def test_how_the_server_is(server):
    for path in ("/health", "/ready", "/ping"):
        answer = await server.client.get(path)
        assert (answer.status_code, answer.json()) == (200, {"status": "ready"})
        assert (await server.client.head(path)).status_code == 200
    assert (await server.client.post("/ping")).status_code == 200
    assert (await server.client.post("/health")).status_code == 405
    assert (await server.client.get("/load")).json() == {"server_load": 0}
    assert (await server.client.get("/version")).json() == {"version": __version__}


@pytest.mark.parametrize(
    ("state", "health", "ready"),
    [
        ("ready", 200, 200),
        ("draining", 200, 503),
        ("starting", 503, 503),
        ("restarting", 503, 503),
        ("stalled", 503, 503),
        ("dead", 503, 503),
    ],
)
async def test_every_state_has_its_status(state, health, ready, server, monkeypatch):
    now = Health(state, "why /home/x 0x7f00aa11bb22", 1, 2.0, 3, 4)
    monkeypatch.setattr(server.engine.core, "health", lambda: now)
    for path, status in (("/health", health), ("/ready", ready), ("/ping", health)):
        answer = await server.client.get(path)
        assert (answer.status_code, answer.json()) == (status, {"status": state})
        assert ("retry-after" in answer.headers) == (status == 503)
    assert (await server.client.get("/load")).json() == {"server_load": 7}


async def test_without_a_key_and_without_dev_mode_the_verbs_are_not_there(server):
    for path in VERBS:
        answer = await server.client.post(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, 404)
    for path in ("/server_info", "/is_paused", "/is_sleeping"):
        assert (await server.client.get(path)).status_code == 404
    assert not await server.engine.is_paused()


async def test_pause_and_resume(as_operator):
    assert (await as_operator.get("/is_paused")).json() == {"is_paused": False}
    assert (await as_operator.post("/pause?mode=keep&clear_cache=false")).json() == {"status": "paused"}
    assert (await as_operator.get("/is_paused")).json() == {"is_paused": True}
    assert (await as_operator.post("/resume")).json() == {"status": "resumed"}
    assert (await as_operator.get("/is_paused")).json() == {"is_paused": False}


async def test_sleep_and_wake_up(as_operator):
    assert (await as_operator.post("/sleep?level=0")).status_code == 200
    assert (await as_operator.get("/is_paused")).json() == {"is_paused": True}
    assert (await as_operator.post("/wake_up")).status_code == 200
    assert (await as_operator.get("/is_sleeping")).json() == {"is_sleeping": False}


async def test_caches_and_workers(as_operator):
    for path in (
        "/reset_prefix_cache?reset_running_requests=true",
        "/reset_mm_cache",
        "/reset_encoder_cache",
    ):
        answer = await as_operator.post(path)
        assert (answer.status_code, answer.content) == (200, b"")
    answer = await as_operator.post("/collective_rpc", json={"method": "ping", "kwargs": {"a": 1}})
    assert answer.json()["results"][:2] == ["ping", {"a": 1}]


async def test_one_replica_stays_one(as_operator):
    answer = await as_operator.post("/scale_elastic_ep", json={"new_data_parallel_size": 2})
    assert (answer.status_code, answer.json()["error"]["message"][:20]) == (501, "One replica stays on")
    assert (await as_operator.post("/scale_elastic_ep", json={})).status_code == 400


async def test_new_weights(as_operator):
    asked = {"model_path": "/elsewhere", "weight_version": "2"}
    answer = await as_operator.post("/update_weights_from_disk", json=asked)
    assert (answer.status_code, answer.json()) == (200, {"status": "updated"})
    assert (await as_operator.get("/get_weight_version")).json() == {"weight_version": "2"}
    for wrong in {}, {"model_path": 3}, asked | {"mode": "never"}:
        assert (await as_operator.post("/update_weights_from_disk", json=wrong)).status_code == 400


async def test_requests_of_others_can_be_ended_by_their_exact_ids(as_operator, server):
    assert (await as_operator.post("/abort", json={"request_ids": ["unknown"]})).status_code == 200
    assert (await as_operator.post("/abort_requests", json={"request_ids": "a"})).status_code == 400
    assert (await as_operator.post("/abort", content=b"")).status_code in (400, 415)


async def test_with_admins_keys_the_verbs_are_theirs(server, monkeypatch):
    admin, other = Secret.of("admins-key"), Secret.of("other-key")
    aborted = []

    async def abort(ids, tenant):
        aborted.append((ids, tenant))

    async def ask(key, path, method="POST"):
        body = {"request_ids": ["a"]} if "abort" in path else None
        return await client.request(method, path, json=body, headers={"x-api-key": key})

    monkeypatch.setattr(server.engine, "abort", abort)
    with configured(server, api_key=[admin, other], admin_api_key=[admin]) as config:
        transport = httpx.ASGITransport(build_stack(server.app, config, is_loopback=True).app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for path in VERBS:
                if "abort" not in path:
                    refused = await ask("other-key", path)
                    assert (refused.status_code, refused.json()["error"]["code"]) == (403, 403)
            assert (await ask("admins-key", "/is_paused", "GET")).status_code == 200
            told = await ask("admins-key", "/server_info", "GET")
            assert told.json()["server"]["admin_api_key"] == ["***"]
            for key in ("other-key", "admins-key"):
                assert (await ask(key, "/abort")).status_code == 200
    assert aborted == [(["a"], other.tenant), (["a"], None)]


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/pause?mode=now", "mode"),
        ("/pause?clear_cache=maybe", "clear_cache"),
        ("/sleep?level=3", "level"),
        ("/sleep?level=-1", "level"),
        ("/sleep?level=\u00b2", "level"),
        ("/wake_up?tags=nothing", "tags"),
        ("/reset_prefix_cache?reset_running_requests=2", "reset_running_requests"),
    ],
)
async def test_wrong_parameters(as_operator, path, param):
    answer = await as_operator.post(path)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_profiles_need_a_folder(as_operator):
    for path in ("/start_profile", "/stop_profile"):
        answer = await as_operator.post(path)
        assert (answer.status_code, "profiler_dir" in answer.text) == (501, True)


async def test_options_are_told_without_keys(as_operator):
    answer = await as_operator.get("/server_info")
    told = answer.json()
    assert (told["version"], told["engine"]["model"]["model"]) == (__version__, "fake")
    assert told["server"]["api_key"] == ["***"]
    assert Secret.of("hidden-key").digest.hex() not in answer.text


async def test_a_dead_engine_says_so():
    async with served() as server:
        assert (await server.client.get("/health")).status_code == 200
        await server.engine.shutdown(0)
        assert (await server.client.get("/health")).status_code == 503
