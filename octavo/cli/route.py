"""Spread requests over several servers: one address, without an engine.

By default a request goes where its beginning is in the prefix cache, unless that server has much more to do
than others. Servers that do not answer are left out until they are ready again.
"""

import argparse
import dataclasses

from octavo.base import env
from octavo.base.processes import leave
from octavo.base.registry import load_object
from octavo.cli.flags import add_flags, options
from octavo.config.router import RouterConfig, check_servers
from octavo.config.secret import Secret
from octavo.config.server import ServerConfig
from octavo.serving.process.listener import Listener

_ROUTE = "octavo.serving.router.process:route"
_SHARED = ("host", "port", "insecure", "api_key", "max_request_bytes")

EXAMPLES = """\
  octavo route http://127.0.0.1:8000 http://127.0.0.1:8001
  octavo route http://10.0.0.1:8000 http://10.0.0.2:8000 --policy session --host 0.0.0.0 --api-key "$KEY"
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("servers", nargs="*", metavar="URL", help="Addresses of servers.")
    add_flags(parser.add_argument_group("router"), RouterConfig)


def run(args: argparse.Namespace) -> int:
    """Route until asked to end."""
    urls = check_servers(args.servers)
    config = RouterConfig(**options(args, RouterConfig))
    config.check()
    if not config.api_key:
        config = dataclasses.replace(config, api_key=[Secret.of(key) for key in env.api_keys()])
    server = ServerConfig(**{name: getattr(config, name) for name in _SHARED})
    with Listener.open(server) as listener:
        load_object(_ROUTE)(urls, config, server, listener)
    return leave(0)
