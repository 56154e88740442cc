"""`Connection`: uvicorn's HTTP/1.1 connection, with bounds on what a client may send, hold or leave unread.

Made by `http_server`, one per socket. Sizes are checked as bytes arrive; times by `check`, which the server
calls for every connection once a second, so that a request arms no timer of its own.
"""

import fcntl
import termios
import time
from array import array
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Literal

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from octavo.config.server import ServerConfig
from octavo.serving.errors import HTTPError, error_body
from octavo.serving.process.request_parser import RequestParser

_MAX_HEADERS = 100
_LINGER_S = 2.0
"""How long a refused client is listened to: closing on unread bytes would take the answer from it."""


class _Stop(Exception):
    """Stops the parser."""


class Connection(HttpToolsProtocol):
    """One client's connection."""

    def __init__(self, config: Config, state: ServerState, limits: ServerConfig) -> None:
        super().__init__(config=config, server_state=state, app_state={})
        self.parser: Any = RequestParser(self, self._should_upgrade)
        self._limits = limits
        self._owes: Literal["head", "body", "nothing", "silence"] = "head"
        """What is to come from the client; silence: it has been refused, what it sends is dropped."""
        self._owes_since_s = self._stuck_since_s = time.monotonic()
        self._num_head_bytes = 0
        self._num_unread = 0
        self._pieces: list[bytes] = []
        self._fault: HTTPError | None = None
        """Why the parser was stopped."""
        self._refusal: HTTPError | None = None
        """Waits until the requests before it are answered."""

    def data_received(self, data: bytes) -> None:
        """Feed the parser, unless the head of the request grows too large."""
        if self._owes == "silence":
            return
        if self._owes == "nothing":
            self._expect("head")
        if self._owes == "head":
            self._num_head_bytes += len(data)
        super().data_received(data)
        self._pass_on_body()
        if self._owes == "head" and self._num_head_bytes > self._limits.max_header_bytes:
            self._refuse(self._head_too_large())

    def on_headers_complete(self) -> None:
        """The head is there: judge it, then go on."""
        if fault := self._fault_of_head():
            self._fault = fault
            raise _Stop
        if self.parser.ignores_offer:
            return
        self._expect("body")
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of the body; pieces that arrive together are passed on together, however small."""
        self._pieces.append(body)

    def _pass_on_body(self) -> None:
        if self._pieces:
            pieces, self._pieces = self._pieces, []
            super().on_body(b"".join(pieces))

    def on_message_complete(self) -> None:
        """The body is there."""
        if self.parser.ignores_offer:
            return
        self._pass_on_body()
        self._expect("nothing")
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What uvicorn does when the parser stops, whatever stopped it."""
        self._refuse(
            self._fault or HTTPError(400, "What arrived is not HTTP/1.1 as this server understands it.")
        )

    def on_response_complete(self) -> None:
        """A request is answered; the refusal of a later one has waited for the last of them."""
        is_last = not self.pipeline
        super().on_response_complete()
        if is_last and self._refusal is not None:
            self._write(self._refusal)
            self._refusal = None

    def check(self, now: float) -> None:
        """Refuse or cut a client that makes the server wait. now: monotonic seconds."""
        if (self._owes in ("head", "nothing") and self._is_answering()) or self._refusal is not None:
            self._owes_since_s = now  # its turn has not come yet
        allowed_s = {
            "head": self._limits.header_timeout,
            "body": self._limits.body_timeout,
            "nothing": self._limits.keep_alive_timeout,
            "silence": _LINGER_S,
        }[self._owes]
        if now - self._owes_since_s > allowed_s:
            self._give_up(allowed_s)
        num_unread = self._count_unread()
        if not 0 < self._num_unread <= num_unread:
            self._stuck_since_s = now
        self._num_unread = num_unread
        if now - self._stuck_since_s > self._limits.write_timeout:
            self.transport.abort()

    def _count_unread(self) -> int:
        """Bytes of answers that the client has not taken: those here, and those that the system holds."""
        count = array("i", [0])
        with suppress(OSError, ValueError):  # closed meanwhile, or a system that does not tell
            fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, count)
        return self.transport.get_write_buffer_size() + count[0]

    def _expect(self, part: Literal["head", "body", "nothing", "silence"]) -> None:
        self._owes = part
        self._owes_since_s = time.monotonic()
        self._num_head_bytes = 0

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _fault_of_head(self) -> HTTPError | None:
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > self._limits.max_header_bytes or len(self.headers) > _MAX_HEADERS:
            return self._head_too_large()
        codings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings not in ([], [b"chunked"]):
            return HTTPError(501, "Transfer-Encoding must be chunked, and nothing else.", "Transfer-Encoding")
        return None

    def _head_too_large(self) -> HTTPError:
        most = f"{self._limits.max_header_bytes} bytes or {_MAX_HEADERS} lines"
        return HTTPError(431, f"The head of the request is larger than {most}.", kind="RequestTooLargeError")

    def _give_up(self, allowed_s: float) -> None:
        """The client did not send in time what it owes."""
        if self._owes in ("nothing", "silence") or (self._owes == "head" and not self._num_head_bytes):
            self.transport.close()
        else:
            text = f"The {self._owes} of the request did not come within {allowed_s:g} s."
            self._refuse(HTTPError(408, text, kind="TimeoutError"))

    def _refuse(self, error: HTTPError) -> None:
        """Answer in place of the application, behind the answers that are owed, and listen no more."""
        is_earlier = self._is_answering() and not self.cycle.more_body  # the request refused has no cycle
        self._expect("silence")
        if is_earlier or self.pipeline:
            if not is_earlier:
                self.pipeline.popleft()
            self._refusal = error
        elif self._is_answering() and self.cycle.response_started:
            self.transport.abort()
        else:
            if self._is_answering():
                self.cycle.disconnected = True
                self.cycle.message_event.set()
            self._write(error)

    def _write(self, error: HTTPError) -> None:
        if self.transport.is_closing():
            return
        body = error_body(error)
        head = (
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self._expect("silence")
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()
