"""One line of a batch: a request as it would come over HTTP, and its answer as a line of the output.

Used by `batch_runner` behind the server, and by `octavo run-batch` without one. A body is read, checked and
answered by the code that serves its route.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any
from uuid import uuid4

import msgspec
from msgspec import Raw, Struct
from starlette.responses import Response

from octavo.base.errors import EngineDead, Overloaded, RequestError, wrong
from octavo.serving.body import parse_aside, parse_body
from octavo.serving.caller import Caller
from octavo.serving.errors import error_body, http_error
from octavo.serving.openai import chat, completions
from octavo.serving.openai.answers import encode
from octavo.serving.openai.generation import Generation
from octavo.serving.openai.protocol import ChatRequest, CompletionRequest, SamplingFields
from octavo.serving.pooling import embeddings, scores
from octavo.serving.pooling.work import Answer, check_pooling

RESULT_BEGINS = b'{"id":"batch_req_'
"""The first bytes of every LineResult."""
_LONGEST_WAIT_S = 1.0
_MAX_DEATHS = 3
"""Engines that one line may outlive: it may be what kills them."""


class BatchLine(Struct, kw_only=True):
    """One line of an input file."""

    custom_id: str
    method: str
    url: str
    body: Raw


class LineResponse(Struct):
    """What HTTP would have answered."""

    status_code: int
    request_id: str
    body: Raw


class LineError(Struct):
    """Why there is no answer."""

    code: str
    message: str


class LineResult(Struct, kw_only=True):
    """One line of an output file."""

    id: str
    custom_id: str
    response: LineResponse | None = None
    error: LineError | None = None

    @property
    def is_good(self) -> bool:
        """Whether it was answered as asked."""
        return self.response is not None and self.response.status_code == 200


class LineFault(Exception):
    """A line that is no request; `code` as OpenAI's."""

    def __init__(self, code: str, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.parameter = parameter


ENDPOINTS: dict[str, tuple[type[SamplingFields], Callable[[Caller, Any], tuple[Generation, Any]]]] = {
    "/v1/chat/completions": (ChatRequest, chat.prepare),
    "/v1/completions": (CompletionRequest, completions.prepare),
}
"""What a batch may ask for: how its body is read, and made the engine's work with the form of its answer."""
POOLING: dict[str, tuple[type[Struct], Answer]] = embeddings.ANSWERS | scores.ANSWERS
"""The same of models that pool."""


def check_endpoint(endpoint: str) -> None:
    """Raises RequestError for one that batches cannot have."""
    if endpoint not in (*ENDPOINTS, *POOLING):
        known = ", ".join((*ENDPOINTS, *POOLING))
        raise RequestError(f"Batches are for {known}; not for {endpoint[:100]!r}.", "endpoint")


def read_line(content: bytes, endpoint: str = "") -> BatchLine:
    """A line of a batch; its body is read later. Raises LineFault.

    endpoint: the batch's; when empty, `answer_line` tells of one that is not among ENDPOINTS
    """
    try:
        line = msgspec.json.decode(content, type=BatchLine)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise LineFault("invalid_json_line", f"This line is no request of a batch: {error}.") from None
    if line.method != "POST":
        raise LineFault("invalid_method", f"method must be POST, got {line.method[:20]!r}.", "method")
    if endpoint not in ("", line.url):
        raise LineFault("invalid_url", f"url must be {endpoint}, got {line.url[:100]!r}.", "url")
    return line


async def answer_line(caller: Caller, line: BatchLine) -> LineResult:
    """What the line's request brings, an error included; waits while the engine is full or restarts.

    Raises EngineDead when no engine comes back.
    """
    num_deaths = 0
    while True:
        try:
            return _result(caller, line, 200, await _content(caller, line))
        except Overloaded as error:
            await asyncio.sleep(min(error.retry_after_s, _LONGEST_WAIT_S))
        except EngineDead as error:
            num_deaths += 1
            if error.retry_after_s is None:
                raise
            if num_deaths == _MAX_DEATHS:
                return _failure(caller, line, error)
            await asyncio.sleep(error.retry_after_s)
        except Exception as error:
            return _failure(caller, line, error)


def unanswered(line: BatchLine, code: str, message: str) -> LineResult:
    """The result of a line that was not tried, or not finished."""
    return LineResult(id=_new_id(), custom_id=line.custom_id, error=LineError(code, message))


async def _content(caller: Caller, line: BatchLine) -> bytes:
    if line.url not in (*ENDPOINTS, *POOLING):
        raise wrong("url", f"must be {' or '.join((*ENDPOINTS, *POOLING))}, got {line.url[:100]!r}")
    if line.url in POOLING and caller.engines.only() is not None:
        check_pooling(caller, line.url)
    model, _ = (ENDPOINTS | POOLING)[line.url]
    parse = partial(parse_body, model=model, strict=caller.config.strict)
    body: Any = await parse_aside(bytes(line.body), parse)
    with await caller.engines.borrow(body.model, getattr(body, "lora", None)):
        return await _answer(caller, line.url, body)


async def _answer(caller: Caller, url: str, body: Any) -> bytes:
    """The answer to a body as JSON; its model is there."""
    if url in ENDPOINTS:
        if body.stream:
            raise RequestError("The answers of a batch are not streamed: leave stream out.", "stream")
        generation, form = ENDPOINTS[url][1](caller, body)
        return await generation.content(form.whole)
    check_pooling(caller.asking(body.model), url)
    made = await POOLING[url][1](caller, body)
    if isinstance(made, Response):
        raise RequestError("The answers of a batch are JSON: ask for float or base64.", "encoding_format")
    return encode(made)


def _failure(caller: Caller, line: BatchLine, error: Exception) -> LineResult:
    return _result(caller, line, http_error(error).status, error_body(error))


def _result(caller: Caller, line: BatchLine, status: int, content: bytes) -> LineResult:
    response = LineResponse(status, caller.request_id, Raw(content))
    return LineResult(id=_new_id(), custom_id=line.custom_id, response=response)


def _new_id() -> str:
    return f"batch_req_{uuid4().hex}"
