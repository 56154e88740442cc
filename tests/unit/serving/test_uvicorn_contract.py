"""The names of uvicorn and Starlette that are no public interface: a release that renames one fails here."""

import ast
import importlib.metadata
import inspect
import tomllib
from pathlib import Path

import pytest
from starlette._utils import get_route_path
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from octavo.config.server import ServerConfig
from octavo.serving.process import connection
from octavo.serving.process.connection import Connection

ROOT = Path(__file__).resolve().parents[3]
METHODS = {
    "_should_upgrade",
    "data_received",
    "on_body",
    "on_headers_complete",
    "on_message_complete",
    "on_response_complete",
    "send_400_response",
    "shutdown",
}
ATTRIBUTES = {"cycle", "headers", "parser", "pipeline", "transport", "url"}
"""Of HttpToolsProtocol; url is set when the parser has read it."""
CYCLE = {"disconnected", "message_event", "more_body", "response_complete", "response_started"}
STATE = {"connections", "default_headers", "tasks"}


async def _app(scope, receive, send):
    pass


async def test_the_names_are_there():
    config = Config(_app, http=Connection, interface="asgi3", lifespan="off", log_config=None)
    config.load()
    state = ServerState()
    protocol = Connection(config, state, ServerConfig())
    assert {name for name in METHODS if not callable(getattr(HttpToolsProtocol, name, None))} == set()
    assert {name for name in ATTRIBUTES - {"url"} if not hasattr(protocol, name)} == set()
    assert "self.url" in inspect.getsource(HttpToolsProtocol)
    assert {name for name in STATE if not hasattr(state, name)} == set()
    source = inspect.getsource(RequestResponseCycle.__init__)
    assert {name for name in CYCLE if f"self.{name} = " not in source} == set()
    assert protocol.connections is state.connections and protocol.tasks is state.tasks
    assert hasattr(config, "ssl")
    assert get_route_path({"path": "/base/x", "root_path": "/base"}) == "/x"


def test_no_other_name_is_used():
    """Everything that Connection reads of itself is its own, or named above."""
    tree = ast.parse(inspect.getsource(connection))
    [own] = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "Connection"]
    selves = [
        node
        for node in ast.walk(own)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    ]
    methods = {node.name for node in own.body if isinstance(node, ast.FunctionDef)}
    state = {node.attr for node in selves if isinstance(node.ctx, ast.Store)}
    assert {node.attr for node in selves} - methods - state <= METHODS | ATTRIBUTES
    cycles = {
        node.attr
        for node in ast.walk(own)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "cycle"
    }
    assert cycles == CYCLE


@pytest.mark.parametrize("name", ["starlette", "uvicorn"])
def test_the_versions_are_bounded(name):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [needed] = [line for line in project["dependencies"] if line.startswith(name)]
    low, high = (tuple(map(int, part.strip("<>=").split("."))) for part in needed[len(name) :].split(","))
    installed = tuple(map(int, importlib.metadata.version(name).split(".")))
    assert low <= installed < high
