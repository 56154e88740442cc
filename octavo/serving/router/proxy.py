"""`Proxy`: the application of a router. Each request goes to a server, its answer back as it comes.

Another server is tried while no byte of an answer was sent: after a failed connection, and after 503. Who
leaves has its request cancelled at the server. What begins with /router is the router's own.
"""

import asyncio
from collections.abc import Iterable

import aiohttp
from starlette.types import Message, Receive, Scope, Send
from yarl import URL

from octavo.base.log import get_logger
from octavo.config.router import RouterConfig
from octavo.serving.errors import HTTPError, error_response
from octavo.serving.router.prompts import Prompt, Tokenizer, read_prompt
from octavo.serving.router.servers import Servers
from octavo.serving.router.status import Status

logger = get_logger(__name__)
_OF_THE_CONNECTION = frozenset(
    b"connection keep-alive proxy-connection te trailer transfer-encoding upgrade host content-length".split()
)
_RETRIED = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError, OSError)
_BUSY = 503
_SHORT_BYTES = 1 << 14
"""Bodies up to that are tokenized on the event loop."""


def open_session(config: RouterConfig) -> aiohttp.ClientSession:
    """Return a client that adds nothing to requests, and keeps nothing of answers."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0),  # less than servers keep theirs open
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=config.connect_timeout),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),  # one client's are not another's
        skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
    )


class Proxy:
    """An ASGI application over aiohttp's client, used from one event loop."""

    def __init__(
        self,
        servers: Servers,
        config: RouterConfig,
        session: aiohttp.ClientSession,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """tokenizer: of the model that the servers have"""
        self._tokenizer = tokenizer
        self._servers = servers
        self._config = config
        self._session = session
        self._status = Status(servers)
        self.is_draining = False
        self.num_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; WebSockets are refused."""
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1011})
            return
        self.num_open += 1
        try:
            await self._answer(scope, receive, send)
        finally:
            self.num_open -= 1

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        own = self._status.answer(scope, is_draining=self.is_draining)
        if own is not None:
            await own(scope, receive, send)
            return
        try:
            if self.is_draining:
                raise HTTPError(503, "The router is shutting down.", headers={"Retry-After": "1"})
            body = await self._read(receive)
        except HTTPError as error:
            await error_response(error)(scope, receive, send)
            return
        watching = asyncio.create_task(_cancel_when_gone(receive, asyncio.current_task()))
        try:
            await self._forward(scope, body, send)
        except HTTPError as error:
            await error_response(error)(scope, receive, send)
        except asyncio.CancelledError:
            if not watching.done():  # it is the router that ends
                raise
        finally:
            watching.cancel()

    async def _read(self, receive: Receive) -> bytes:
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise HTTPError(400, "The body did not come.")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._config.max_request_bytes:
                raise HTTPError(
                    413, f"The body is larger than the {self._config.max_request_bytes} bytes allowed."
                )
            if not message.get("more_body"):
                return b"".join(parts)

    async def _forward(self, scope: Scope, body: bytes, send: Send) -> None:
        """Try one server after the other. Raises HTTPError, and what cuts an answer short."""
        if self._tokenizer is not None and len(body) > _SHORT_BYTES:
            prompt = await asyncio.to_thread(self._prompt, scope, body)
        else:
            prompt = self._prompt(scope, body)
        tried: set[int] = set()
        reason = "No server is ready."
        while (number := self._servers.choose(prompt, tried)) is not None:
            tried.add(number)
            visit = self._servers.begin(number, prompt)
            server = self._servers.all[number]
            has_sent = False
            try:
                async with self._request(server.url, scope, body) as answer:
                    if answer.status == _BUSY and self._servers.choose(prompt, tried) is not None:
                        server.num_retried += 1
                        continue
                    self._servers.run(visit)
                    server.num_answers[answer.status] += 1
                    has_sent = True
                    await _send_on(answer, send)
                    return
            except _RETRIED as error:
                if has_sent:
                    logger.warning("%s broke an answer off: %s", server.url, error or type(error).__name__)
                    raise
                self._servers.note_failure(number, error)
                server.num_retried += 1
                reason = "No server answers."
            finally:
                self._servers.end(visit)
        raise HTTPError(_BUSY, f"{reason} Try again later.", headers={"Retry-After": "2"})

    def _prompt(self, scope: Scope, body: bytes) -> Prompt:
        if self._config.policy == "round_robin" or not body:
            return Prompt()
        prompt = read_prompt(body, self._tokenizer if self._config.policy == "prefix" else None)
        name = self._config.session_header.lower().encode("latin-1")
        session = next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")
        return Prompt(prompt.num_tokens, prompt.beginnings, session) if session else prompt

    def _request(self, url: str, scope: Scope, body: bytes) -> "aiohttp.client._RequestContextManager":
        headers = [
            (key.decode("latin-1"), value.decode("latin-1"))
            for key, value in scope["headers"]
            if key not in _OF_THE_CONNECTION and not self._replaces(key)
        ]
        if self._config.upstream_api_key:
            headers.append(("Authorization", f"Bearer {self._config.upstream_api_key}"))
        query = scope["query_string"].decode("latin-1")
        target = url + scope.get("raw_path", scope["path"].encode()).decode("latin-1")
        return self._session.request(
            scope["method"],
            URL(f"{target}?{query}" if query else target, encoded=True),
            headers=headers,
            data=body or None,
            allow_redirects=False,
        )

    def _replaces(self, key: bytes) -> bool:
        return bool(self._config.upstream_api_key) and key in (b"authorization", b"x-api-key")


async def _send_on(answer: aiohttp.ClientResponse, send: Send) -> None:
    headers = _kept(answer.raw_headers)
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    async for piece in answer.content.iter_any():
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def _kept(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    lowered = ((key.lower(), value) for key, value in headers)
    return [(key, value) for key, value in lowered if key not in _OF_THE_CONNECTION - {b"content-length"}]


async def _cancel_when_gone(receive: Receive, work: asyncio.Task[None] | None) -> None:
    """Task: cancel the work for a client that has left."""
    message: Message = {"type": ""}
    while message["type"] != "http.disconnect":
        message = await receive()
    if work is not None:
        work.cancel()
