"""One request to a server, timed: `Target.ask`. Knows HTTP and event streams, no schedule and no statistics.

Times are `time.perf_counter`'s, taken when an event has been read. Definitions are `vllm bench serve`'s: a
chunk with choices counts, whatever text it has; TTFT is the first of them, an inter-token latency the time
between two, the latency of a request ends with the last.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from octavo.base.errors import ConfigError, OctavoError
from octavo.bench.backends import Backend
from octavo.bench.generated import Sample

_LONGEST_S = 6 * 3600.0
_MAX_LINE = 1 << 24
_MAX_ERROR = 300


class _Event(msgspec.Struct, gc=False):
    """What is read of an event."""

    choices: list[dict[str, Any]] = []
    usage: dict[str, Any] | None = None
    error: Any = None


_DECODER = msgspec.json.Decoder(_Event)


@dataclass(slots=True)
class Timing:
    """What became of a request; times in seconds."""

    prompt_len: int
    success: bool = False
    start_time: float = 0.0
    ttft: float = 0.0
    itl: list[float] = field(default_factory=list)
    latency: float = 0.0
    output_tokens: int = 0
    """As the server counts them; 0 when it does not."""
    generated_text: str = ""
    num_inputs: int = 1
    client_queue_time: float = 0.0
    """From the time at which it was due until it was sent (`max_concurrency`)."""
    error: str = ""


class Target:
    """A server and the way to ask it. An asynchronous context manager that holds its connections."""

    def __init__(
        self,
        base_url: str,
        backend: Backend,
        *,
        endpoint: str = "",
        headers: Mapping[str, str] | None = None,
        verify: bool = True,
    ) -> None:
        """endpoint: path instead of the backend's own; verify: check certificates. Raises ConfigError."""
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(f"--base-url {base_url} must look like http://127.0.0.1:8000.")
        self.base_url, self.backend = base_url.rstrip("/"), backend
        self._endpoint = endpoint or backend.endpoint
        self._headers, self._verify = dict(headers or {}), verify

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, ttl_dns_cache=300, ssl=self._verify, keepalive_timeout=60
            ),
            timeout=aiohttp.ClientTimeout(total=_LONGEST_S),
            headers=self._headers,
            read_bufsize=_MAX_LINE,
            trust_env=True,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def ask(self, sample: Sample, model: str, extra: Mapping[str, Any]) -> Timing:
        """Send one request and read its answer to the end; what goes wrong is told in the result."""
        body = {**self.backend.body(sample, model), **extra}
        inputs = len(sample.prompt) if isinstance(sample.prompt, list) else 1
        timing = Timing(sample.prompt_len, num_inputs=self.backend.num_inputs(inputs))
        ids = {"x-request-id": sample.request_id} if sample.request_id else None
        timing.start_time = time.perf_counter()
        try:
            url = self.base_url + self._endpoint
            async with self._session.post(url, json=body, headers=ids) as response:
                if response.status != 200:
                    timing.error = _reason(response.status, await response.text())
                elif self.backend.text:
                    await _read_stream(response, self.backend.text, timing)
                else:
                    content = await response.read()
                    timing.latency = timing.ttft = time.perf_counter() - timing.start_time
                    usage = json.loads(content).get("usage") or {}
                    timing.prompt_len, timing.success = usage.get("prompt_tokens") or 0, True
        except (
            aiohttp.ClientError,
            TimeoutError,
            OSError,
            ValueError,
            KeyError,
            TypeError,
            msgspec.MsgspecError,
        ) as error:
            timing.success, timing.error = False, f"{type(error).__name__}: {error}"
        return timing

    async def get(self, path: str) -> str:
        """Return a page of the server, whatever its status. Raises OctavoError when no server answers."""
        try:
            async with self._session.get(self.base_url + path) as response:
                return await response.text() if response.status == 200 else ""
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise OctavoError(
                f"No server answers at {self.base_url} ({error}). Start one with `octavo serve`, "
                "or name another with --base-url or --host and --port."
            ) from error

    async def post(self, path: str) -> None:
        """Send an empty request (the profiler's verbs). Raises OctavoError."""
        async with self._session.post(self.base_url + path) as response:
            if response.status != 200:
                raise OctavoError(f"{path}: {_reason(response.status, await response.text())}")

    async def first_model(self) -> tuple[str, str]:
        """Return the name of the server's first model, and where that came from. Raises OctavoError."""
        try:
            models = json.loads(await self.get("/v1/models") or "{}").get("data")
            return str(models[0]["id"]), str(models[0].get("root") or models[0]["id"])
        except (ValueError, LookupError, TypeError, AttributeError):
            raise ConfigError(
                f"The server at {self.base_url} lists no model: name it with --model."
            ) from None

    async def wait_until_ready(
        self, sample: Sample, model: str, extra: Mapping[str, Any], limit_s: float
    ) -> None:
        """Repeat a request until one succeeds. Raises OctavoError after `limit_s` seconds."""
        end = time.perf_counter() + limit_s
        while not (timing := await self.ask(sample, model, extra)).success:
            if time.perf_counter() > end:
                raise OctavoError(f"The server was not ready after {limit_s:g} s: {timing.error}")
            await asyncio.sleep(min(5.0, limit_s / 10))


async def _read_stream(
    response: aiohttp.ClientResponse, read: Callable[[dict[str, Any]], str | None], timing: Timing
) -> None:
    last, texts = timing.start_time, []
    async for data in _events(response):
        now, event = time.perf_counter(), _DECODER.decode(data)
        if event.error is not None:
            timing.error = f"The server says: {event.error}"[:_MAX_ERROR]
            return
        if event.choices:
            if timing.ttft:
                timing.itl.append(now - last)
            else:
                timing.ttft = now - timing.start_time
            last = now
            texts.append(read(event.choices[0]) or "")
        elif event.usage:
            timing.output_tokens = event.usage.get("completion_tokens") or 0
            timing.prompt_len = event.usage.get("prompt_tokens") or timing.prompt_len
    timing.latency, timing.generated_text = last - timing.start_time, "".join(texts)
    timing.success = timing.ttft > 0
    if not timing.success:
        timing.error = "Never received a valid chunk to calculate TTFT. This response is marked as failed!"


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The data of a stream's events but [DONE], each as soon as its line is complete."""
    rest = b""
    async for content in response.content.iter_any():
        *lines, rest = (rest + content).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                yield data


def _reason(status: int, text: str) -> str:
    try:
        error = json.loads(text)
        error = error.get("error", error)
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        pass
    return f"status {status}: {text[:_MAX_ERROR]}"
