"""Add replicas to a server while it serves, or drain the last ones.

The server was started with --data-parallel-size above 1 or with --enable-elastic-ep, and with --api-key or
--dev-mode. Returns when the new replicas serve, or when those that are drained have ended.
"""

import argparse
import json
from contextlib import suppress
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from octavo.base import env
from octavo.base.errors import OctavoError

EXAMPLES = """\
  octavo scale 4 --url http://127.0.0.1:8000 --api-key "$KEY"
"""
_MARGIN_S = 900
"""For the start of replicas."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("size", type=int, metavar="N", help="Replicas to have.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="Address of the server.")
    parser.add_argument("--api-key", default="", help="An operator's key.")
    parser.add_argument(
        "--drain-timeout", type=int, default=300, help="Seconds for the requests of a replica that ends."
    )


def run(args: argparse.Namespace) -> int:
    """Ask the server, and say what it answered."""
    body = {"new_data_parallel_size": args.size, "drain_timeout": args.drain_timeout}
    headers = {"Content-Type": "application/json"}
    if key := args.api_key or next(iter([*env.admin_api_keys(), *env.api_keys()]), ""):
        headers["Authorization"] = f"Bearer {key}"
    request = Request(args.url.rstrip("/") + "/scale_elastic_ep", json.dumps(body).encode(), headers)
    try:
        with urlopen(request, timeout=args.drain_timeout + _MARGIN_S):
            print(f"{args.url} has {args.size} replicas.")
    except HTTPError as error:
        text = error.read().decode(errors="replace")
        with suppress(ValueError, LookupError, TypeError):
            text = json.loads(text)["error"]["message"]
        raise OctavoError(f"{args.url}: {text}") from None
    except (URLError, OSError, ValueError) as error:
        raise OctavoError(f"{args.url} does not answer: {error}") from None
    return 0
