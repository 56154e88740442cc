"""The order of the layers, from the network inward: log, host, origins of pages, key, drain, then `inner`.

Called once per API process by `serving.process.api_process`.
"""

from typing import NamedTuple

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from octavo.config.server import ServerConfig
from octavo.serving.metrics_board import MetricsBoard
from octavo.serving.middleware.drain import Drain
from octavo.serving.middleware.hosts import HostCheck
from octavo.serving.middleware.keys import KeyCheck
from octavo.serving.middleware.request_log import RequestLog
from octavo.serving.web_page import OPEN_PATHS

_MONITORING = {"/metrics", "/ping", "/ready", "/version", "/load"}


class Stack(NamedTuple):
    """The whole application, and the layer that the process speaks to."""

    app: ASGIApp
    drain: Drain


def build_stack(
    inner: ASGIApp, config: ServerConfig, *, is_loopback: bool, board: MetricsBoard | None = None
) -> Stack:
    """Wrap `inner`. is_loopback: whether the server listens on a TCP address of this machine alone."""
    app: ASGIApp = (drain := Drain(inner))
    if config.api_key:
        open_paths = {"/health", *OPEN_PATHS} | (_MONITORING if config.open_monitoring else set())
        app = KeyCheck(app, config.api_key, open_paths, config.admin_api_key)
    if config.allowed_origins:
        app = CORSMiddleware(
            app,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods or ("*",),
            allow_headers=config.allowed_headers or ("*",),
            allow_credentials=config.allow_credentials,
            expose_headers=("X-Request-Id", "Retry-After"),
        )
    app = HostCheck(app, config, is_loopback=is_loopback)
    return Stack(RequestLog(app, config, board), drain)
