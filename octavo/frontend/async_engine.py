"""`AsyncLLM`: many requests at once on an event loop, the engine core in a process of its own. Public.

The base of servers. One task reads what the core sends and hands each output to its request's stream.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import suppress
from typing import Any, Self

from octavo.base.errors import EngineDead
from octavo.base.log import get_logger
from octavo.config import EngineArgs, EngineConfig, resolve
from octavo.frontend.client.zmq import AsyncClient
from octavo.frontend.conversation import ChatRenderer
from octavo.frontend.input_processor import InputProcessor
from octavo.frontend.output_processor import OutputProcessor
from octavo.frontend.output_stream import OutputStream
from octavo.frontend.outputs import RequestOutput
from octavo.frontend.prompts import PromptType
from octavo.frontend.text.loader import tokenizer_for
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.messages.request import FinishReason, SchedulerStats
from octavo.messages.sampling import RequestOutputKind, SamplingParams

logger = get_logger(__name__)


class AsyncLLM:
    """One engine and its front, used from one event loop."""

    def __init__(self, config: EngineConfig) -> None:
        """Load the tokenizer; the core's process starts with `start` or with the first request."""
        self.config = config
        self.tokenizer = tokenizer_for(config)
        self.input_processor = InputProcessor(config, self.tokenizer)
        self.chat = ChatRenderer(config, self.tokenizer)
        self.stats = SchedulerStats()
        """As of the last step."""
        self._output_processor = OutputProcessor(self.tokenizer)
        self._client = AsyncClient(config)
        self._streams: dict[str, OutputStream] = {}
        self._starting: asyncio.Task[None] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._error: EngineDead | None = None

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> Self:
        """Decide what the arguments left open."""
        return cls(resolve(args))

    async def start(self) -> None:
        """Start the core and wait until the model is loaded; once. Raises ConfigError, EngineDead."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        await asyncio.shield(self._starting)

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of one request, the last with finished=True; closing the generator aborts it.

        Raises RequestError before anything is started, EngineDead when the core ends.
        """
        await self.start()
        prepared = await asyncio.to_thread(
            self.input_processor.process,
            prompt,
            sampling_params,
            request_id=request_id,
            priority=priority,
            tokenization_kwargs=tokenization_kwargs,
        )
        if self._error is not None:
            raise self._error
        self._output_processor.add(prepared)
        stream = OutputStream(is_delta=prepared.params.output_kind is RequestOutputKind.DELTA)
        self._streams[prepared.request_id] = stream
        output: RequestOutput | None = None
        try:
            for request in prepared.engine_requests:
                self._client.add(request)
            while output is None or not output.finished:
                output = await stream.get()
                yield output
        finally:
            del self._streams[prepared.request_id]
            if output is None or not output.finished:
                self._send_aborts(self._output_processor.abort([prepared.request_id]))

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests: their generators yield a last output with finish reason "abort". Idempotent."""
        ids = [request_id] if isinstance(request_id, str) else request_id
        processed = self._output_processor.end(ids, FinishReason.ABORT)
        self._deliver(processed.request_outputs)
        self._send_aborts(processed.abort_ids)

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prompts."""
        await self.start()
        return bool(await self._client.call("reset_prefix_cache"))

    async def collective_rpc(self, verb: str, arguments: dict[str, Any] | None = None) -> list[Any]:
        """Run a worker's command on every rank; one result per rank."""
        await self.start()
        result: list[Any] = await self._client.call(
            "collective_rpc", {"verb": verb, "arguments": arguments or {}}
        )
        return result

    async def check_health(self) -> None:
        """Raise EngineDead when the core has ended."""
        if self._error is not None:
            raise self._error

    async def get_tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None with skip_tokenizer_init."""
        return self.tokenizer

    @property
    def is_running(self) -> bool:
        """True from the end of the start to the end of the core."""
        return self._reader is not None and not self._reader.done()

    @property
    def errored(self) -> bool:
        """True when the core ended by itself."""
        return self._error is not None

    @property
    def dead_error(self) -> EngineDead | None:
        """Why it ended."""
        return self._error

    async def shutdown(self, timeout_s: float = 5.0) -> None:
        """End the core; open requests end with EngineDead. May be called twice."""
        if self._starting is None:
            return
        await asyncio.wait([self._starting])
        self._fail_all(EngineDead("The engine has been shut down."))
        await self._client.close(timeout_s)
        if self._reader is not None:
            await asyncio.wait([self._reader])

    async def _start(self) -> None:
        await self._client.start()
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        """Task: every output of the core, until it ends."""
        try:
            async for outputs in self._client.outputs():
                self.stats = outputs.stats
                processed = self._output_processor.process(outputs)
                self._deliver(processed.request_outputs)
                self._send_aborts(processed.abort_ids)
        except EngineDead as error:
            logger.error("%s", error)
            self._fail_all(error)
        except Exception as error:
            logger.exception("The front cannot go on.")
            self._fail_all(EngineDead(f"The outputs of the engine cannot be read: {error}"))

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            if (stream := self._streams.get(output.request_id)) is not None:
                stream.put(output)

    def _send_aborts(self, request_ids: list[str]) -> None:
        if request_ids and self._error is None:
            with suppress(EngineDead):  # the reading task is about to tell everybody
                self._client.abort(request_ids)

    def _fail_all(self, error: EngineDead) -> None:
        """Every open request ends with the first error, once."""
        self._error = self._error or error
        self._output_processor.abort(self._output_processor.open_ids())
        for stream in self._streams.values():
            stream.fail(self._error)
