"""`Remote`: the backend that is an OpenAI-compatible server, octavo's or another.

Speaks HTTP and server-sent events with the standard library alone. What the server sends is foreign: lines
are bounded, and nothing but text and numbers is taken out of them.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, NoReturn
from urllib.parse import urlsplit

from octavo.base.errors import ConfigError, OctavoError, Overloaded, RequestError, UnknownModel
from octavo.cli.backend import Answer, Message, Piece

_CONNECT_S = 10.0
_SILENCE_S = 300.0
"""Longest wait for the next word: a long prompt may have to be computed first."""
_MAX_LINE = 1 << 20
_MAX_ERROR = 1 << 16


class Remote:
    """One model of one server. A connection lasts as long as an answer."""

    def __init__(
        self, url: str, *, model: str = "", api_key: str = "", sampling: Mapping[str, Any] | None = None
    ) -> None:
        """url: of the server, with or without /v1
        model: its first when empty
        sampling: fields of each request

        Raises ConfigError for a URL of another kind, OctavoError when no server answers there.
        """
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url {url} must look like http://127.0.0.1:8000 or https://host/v1.")
        self._url = url
        self._is_secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port
        path = parts.path.rstrip("/")
        self._path = path if path.endswith("/v1") else path + "/v1"
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._sampling = dict(sampling or {})
        self.model = model or self._first_model()

    def chat(self, messages: list[Message]) -> Answer:
        """/v1/chat/completions, streamed."""
        for choice, num_tokens in self._stream("/chat/completions", {"messages": messages}):
            yield Piece(_text((choice.get("delta") or {}).get("content")), num_tokens)

    def complete(self, prompt: str) -> Answer:
        """/v1/completions, streamed."""
        for choice, num_tokens in self._stream("/completions", {"prompt": prompt}):
            yield Piece(_text(choice.get("text")), num_tokens)

    def _first_model(self) -> str:
        with self._ask("GET", "/models") as response:
            models = _object(response.read(_MAX_LINE)).get("data")
        if not isinstance(models, list) or not models or not isinstance(models[0], dict):
            raise ConfigError(f"The server at {self._url} lists no model; name one: --model-name.")
        return str(models[0].get("id", ""))

    def _stream(self, path: str, question: dict[str, Any]) -> Iterator[tuple[dict[str, Any], int]]:
        """(choice, tokens so far) of each chunk. Raises when the stream breaks off."""
        body = {
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._sampling,
            **question,
        }
        num_tokens = 0
        with self._ask("POST", path, body) as response:
            for event in self._events(response):
                if "error" in event:
                    _fail(500, event)
                choices = event.get("choices") or [{}]
                usage = event.get("usage") or {}
                num_tokens = usage.get("completion_tokens") or num_tokens + bool(choices[0])
                yield choices[0], num_tokens

    def _events(self, response: HTTPResponse) -> Iterator[dict[str, Any]]:
        """The data of the stream's events up to [DONE]."""
        try:
            while line := response.readline(_MAX_LINE):
                field, _, data = line.strip().partition(b":")
                if field != b"data":
                    continue  # a comment, an empty line, another field
                if data.strip() == b"[DONE]":
                    return
                yield _object(data)
        except (OSError, HTTPException) as error:
            raise OctavoError(f"The connection to {self._url} broke: {error}") from error
        raise OctavoError(f"The server at {self._url} ended the answer too early.")

    @contextmanager
    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Iterator[HTTPResponse]:
        """Send a request; its answer, of status 200, until one leaves it: to a server the end of interest.

        Raises what the server says else.
        """
        kind = HTTPSConnection if self._is_secure else HTTPConnection
        content = None if body is None else json.dumps(body).encode()
        with closing(kind(self._host, self._port, timeout=_CONNECT_S)) as connection:
            try:
                connection.connect()
                connection.sock.settimeout(_SILENCE_S)
                connection.request(method, self._path + path, content, self._headers)
                response = connection.getresponse()
            except (OSError, HTTPException) as error:
                raise OctavoError(
                    f"No server answers at {self._url} ({error}). Start one with `octavo serve`, or name "
                    "another with --url."
                ) from error
            with response:
                if response.status != 200:
                    _fail(response.status, _object(response.read(_MAX_ERROR), response.reason))
                yield response


def _object(content: bytes, otherwise: str = "") -> dict[str, Any]:
    """A JSON object; anything else as the text of an error."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        return value
    return {"error": {"message": otherwise or "The server sent something that is no JSON object."}}


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _fail(status: int, answer: dict[str, Any]) -> NoReturn:
    error = answer.get("error", answer)
    message = error.get("message") if isinstance(error, dict) else error
    text = f"The server says: {message or 'nothing'} (status {status})"
    match status:
        case 401 | 403:
            raise ConfigError(f"{text}. Give a key: --api-key, or the variable OPENAI_API_KEY.")
        case 404:
            raise UnknownModel(text)
        case 429 | 503:
            raise Overloaded(text)
        case _ if 400 <= status < 500:
            raise RequestError(text)
    raise OctavoError(text)
