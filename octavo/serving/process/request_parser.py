"""`RequestParser`: httptools' parser of requests, which goes on where a client offers an upgrade.

RFC 9110 lets a server ignore such an offer and answer the request as it is; Java's client, for one, offers
h2c with every request. httptools stops behind the head then and takes the body for the other protocol's, so
the request is read once more without the offer. Used by `connection`, which takes WebSocket alone.
"""

from collections.abc import Callable
from typing import Any

import httptools


class RequestParser:
    """Looks like an HttpRequestParser; tells `protocol` of a head with an ignored offer twice."""

    def __init__(self, protocol: Any, takes_offer: Callable[[], bool]) -> None:
        """takes_offer: whether the upgrade offered in the head just read is wanted."""
        self._protocol = protocol
        self._takes_offer = takes_offer
        self._parser = _parser(protocol)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)

    @property
    def ignores_offer(self) -> bool:
        """Whether the head just read offers what is not taken: it comes again without."""
        offers = self._parser.should_upgrade() and b"upgrade" in dict(self._protocol.headers)
        return offers and not self._takes_offer()

    def feed_data(self, data: bytes) -> None:
        """Parse what has arrived. Raises HttpParserError, HttpParserUpgrade for an offer that is taken."""
        parts: list[bytes | memoryview] = [data]
        while parts:
            part = parts.pop()
            try:
                self._parser.feed_data(part)
            except httptools.HttpParserUpgrade as offer:
                if not self.ignores_offer:
                    raise
                parts += [memoryview(part)[offer.args[0] :], self._head()]
                self._parser = _parser(self._protocol)

    def _head(self) -> bytes:
        """Of the request just read, without the offer."""
        version = self._parser.get_http_version()
        lines = [b"%s %s HTTP/%s" % (self._parser.get_method(), self._protocol.url, version.encode())]
        lines += [b"%s: %s" % header for header in self._protocol.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])


def _parser(protocol: Any) -> Any:
    parser = httptools.HttpRequestParser(protocol)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
    return parser
