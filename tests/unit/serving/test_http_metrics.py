"""Counting of HTTP requests: what the labels are, and that clients cannot make them grow."""

import pytest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from octavo.config.server import ServerConfig
from octavo.frontend.observe.engine_metrics import EngineMetrics
from octavo.metrics import Counter
from octavo.serving.app import Endpoint
from octavo.serving.metrics_board import MetricsBoard
from octavo.serving.middleware.request_log import RequestLog
from octavo.serving.registry import Route as Entry


async def item(request):
    return PlainTextResponse("fine")


async def refused(request):
    raise HTTPException(429)


async def broken(request):
    raise RuntimeError("for the test")


async def stream(request):
    async def parts():
        yield b"a"
        yield b"b"

    return StreamingResponse(parts())


@pytest.fixture
def board():
    return MetricsBoard(EngineMetrics())


@pytest.fixture
def client(board):
    entries = [
        Entry("/item/{name}", item, ("GET", "POST")),
        Entry("/refused", refused),
        Entry("/broken", broken),
        Entry("/stream", stream),
        Entry("/health", item),
    ]
    routes = [Route(entry.path, Endpoint(entry), methods=entry.methods) for entry in entries]
    app = RequestLog(Starlette(routes=routes), ServerConfig(), board)
    return TestClient(app, raise_server_exceptions=False)


def counts(board):
    return {
        tuple(metric.labels.values()): metric.value
        for metric in board.http.snapshot()
        if isinstance(metric, Counter)
    }


def test_paths_are_those_of_routes(client, board):
    for name in "abc":
        client.get(f"/item/{name}")
    client.post("/item/a")
    client.get("/refused")
    client.get("/broken")
    client.get("/stream")
    client.get("/nowhere/at/all")
    client.get("/health")
    assert counts(board) == {
        ("/item/{name}", "GET", "2xx"): 3,
        ("/item/{name}", "POST", "2xx"): 1,
        ("/refused", "GET", "4xx"): 1,
        ("/broken", "GET", "5xx"): 1,
        ("/stream", "GET", "2xx"): 1,
        ("none", "GET", "4xx"): 1,
    }
    durations = [m for m in board.http.snapshot() if m.name == "http_request_duration_seconds"]
    assert sum(metric.count for metric in durations) == 8
    assert {tuple(metric.labels) for metric in durations} == {("handler", "method")}


def test_odd_methods_and_paths_leave_no_trace(client, board):
    for n in range(200):
        client.request(f"METHOD{n}", f"/item/{n}")
        client.get(f"/{n}")
    assert {key[:2] for key in counts(board)} == {("/item/{name}", "other"), ("none", "GET")}


def test_starlette_alone_is_enough(board):
    client = TestClient(RequestLog(Starlette(routes=[Route("/x", item)]), ServerConfig(), board))
    client.get("/x")
    assert sum(counts(board).values()) == 1
