"""`route`: the process of `octavo route`, from the first connection to the end of the last."""

import asyncio
import signal

import uvloop
from starlette.types import ASGIApp

from octavo.base.hub import locate
from octavo.base.log import get_logger
from octavo.base.registry import load_object
from octavo.config.router import RouterConfig
from octavo.config.server import ServerConfig
from octavo.serving.middleware.keys import KeyCheck
from octavo.serving.process.http_server import HttpServer
from octavo.serving.process.listener import Listener
from octavo.serving.router.proxy import Proxy, open_session
from octavo.serving.router.servers import Servers

logger = get_logger(__name__)
_OPEN_PATHS = ("/health", "/ready")
_LOAD_TOKENIZER = "octavo.frontend.text.loader:load_tokenizer"
_LAST_WORDS_S = 0.5
_POLL_S = 0.02


def route(urls: list[str], config: RouterConfig, server: ServerConfig, listener: Listener) -> None:
    """Route until asked to end; open requests are finished first."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(urls, config, server, listener))


async def _run(urls: list[str], config: RouterConfig, server: ServerConfig, listener: Listener) -> None:
    asked = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, asked.set)
    tokenizer = None
    if config.tokenizer:
        tokenizer = load_object(_LOAD_TOKENIZER)(locate(config.tokenizer))
    async with open_session(config) as session:
        servers = Servers(urls, config)
        proxy = Proxy(servers, config, session, tokenizer)
        app: ASGIApp = KeyCheck(proxy, config.api_key, _OPEN_PATHS) if config.api_key else proxy
        http = HttpServer(app, server, listener.socket)
        watching = asyncio.create_task(servers.watch(session))
        http.start()
        logger.info("Routing at %s to %s.", listener.url, ", ".join(urls))
        await asked.wait()
        proxy.is_draining = True
        deadline_s = asyncio.get_running_loop().time() + config.shutdown_timeout
        while proxy.num_open and asyncio.get_running_loop().time() < deadline_s:
            await asyncio.sleep(_POLL_S)
        watching.cancel()
        await http.close(_LAST_WORDS_S)
