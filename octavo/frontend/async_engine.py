"""`AsyncLLM`: many requests at once on an event loop, the engine core in a process of its own. Public.

The base of servers. One task reads what the core sends and hands each output to its request's stream.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn, Self

from octavo.base.errors import EngineDead, Overloaded
from octavo.base.log import get_logger
from octavo.config import EngineArgs, EngineConfig, resolve
from octavo.config.concerns import resolve_concerns
from octavo.frontend.admission import Admission, Slot
from octavo.frontend.async_control import AsyncEngineControl
from octavo.frontend.client.zmq import AsyncClient
from octavo.frontend.conversation import ChatRenderer
from octavo.frontend.engine_metrics import EngineMetrics
from octavo.frontend.input_processor import InputProcessor, PreparedRequest
from octavo.frontend.later import refuse_options, refuse_pooling
from octavo.frontend.open_request import Receiver
from octavo.frontend.output_processor import OutputProcessor
from octavo.frontend.output_stream import OutputStream
from octavo.frontend.outputs import RequestOutput
from octavo.frontend.prompts import PromptType, joined_prompt
from octavo.frontend.stats_line import StatsLine
from octavo.frontend.text.loader import tokenizer_for
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.messages.request import EngineRequest, FinishReason, SchedulerStats
from octavo.messages.sampling import RequestOutputKind, SamplingParams

logger = get_logger(__name__)
_GRACE_S = 5.0
"""What the core gets to end by itself before it is killed."""


class AsyncLLM(AsyncEngineControl):
    """One engine and its front, used from one event loop."""

    def __init__(self, *configs: object, **named: object) -> None:
        """Load the tokenizer; the core's process starts with `start` or with the first request.

        configs, named: an EngineConfig, or configs by concern, as in LLMEngine
        """
        self.config = config = resolve_concerns(*configs, **named)
        self.model_config = config.model
        self.tokenizer = tokenizer_for(config)
        self.input_processor = InputProcessor(config, self.tokenizer)
        self.chat = ChatRenderer(config, self.tokenizer)
        self.stats = SchedulerStats()
        """As of the last step."""
        self.metrics = EngineMetrics(config)
        self.admission = Admission(config, self.metrics)
        self._stats_line = StatsLine(self.metrics, config.observability)
        self._output_processor = OutputProcessor(
            self.tokenizer,
            self.metrics,
            strict_ids=config.front.strict_request_ids,
            log_requests=config.observability.enable_log_requests,
        )
        self._client = AsyncClient(config)
        self._streams: dict[str, OutputStream] = {}
        """Of generators, by the requests' keys."""
        self._added: dict[str, Slot] = {}
        """Requests of `add_request`, by key."""
        self._finished: list[RequestOutput] = []
        """Their last outputs, for `step`."""
        self._news = asyncio.Event()
        self._starting: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._is_draining = False
        self._error: EngineDead | None = None

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> Self:
        """Decide what the arguments left open."""
        return cls(resolve(args))

    @classmethod
    def from_engine_config(cls, config: EngineConfig) -> Self:
        """The same from a config in which everything is decided."""
        return cls(config)

    async def start(self) -> None:
        """Start the core and wait until the model is loaded; once. Raises ConfigError, EngineDead."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        await asyncio.shield(self._starting)

    async def generate(  # noqa: PLR0913  # vLLM's signature
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        tenant: str = "",
        deadline_s: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of one request, the last with finished=True; closing the generator aborts it.

        trace_headers, session_id: accepted without effect
        tenant, deadline_s: for the scheduling policies "fair" and "deadline" (seconds after the arrival)
        Raises RequestError and Overloaded before anything is started, EngineDead when the core ends.
        """
        del trace_headers, session_id
        refuse_options(lora_request, data_parallel_rank=data_parallel_rank)
        process = partial(
            self.input_processor.process,
            prompt,
            sampling_params,
            request_id=request_id,
            priority=priority,
            tokenization_kwargs=tokenization_kwargs,
            tenant=tenant,
            deadline_s=deadline_s,
        )
        kind = sampling_params.output_kind if sampling_params else None
        stream = OutputStream(is_delta=kind is RequestOutputKind.DELTA)
        slot = await self._admit(prompt, sampling_params)
        key, output = "", None
        try:
            key = await self._submit(process, slot, stream.put)
            self._streams[key] = stream
            while output is None or not output.finished:
                output = await stream.get()
                yield output
        finally:
            slot.release()
            self._streams.pop(key, None)
            self._send_aborts(self._output_processor.forget([key]))

    async def add_request(  # noqa: PLR0913  # the early and the present form of vLLM's
        self,
        request_id: str | None = None,
        prompt: PromptType | None = None,
        params: SamplingParams | None = None,
        arrival_time: float | None = None,
        *,
        prompt_token_ids: list[int] | None = None,
        sampling_params: SamplingParams | None = None,
        lora_request: Any = None,
        priority: int = 0,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        tenant: str = "",
        deadline_s: float | None = None,
    ) -> str:
        """Start a request whose last output `step` will return; its id (made when None).

        Arguments as in LLMEngine.add_request, errors as in `generate`.
        """
        del trace_headers
        refuse_options(lora_request)
        joined, wanted = joined_prompt(prompt, prompt_token_ids), params or sampling_params
        process = partial(
            self.input_processor.process,
            joined,
            wanted,
            request_id=request_id,
            priority=priority,
            arrival_s=arrival_time,
            tokenization_kwargs=tokenization_kwargs,
            tenant=tenant,
            deadline_s=deadline_s,
        )
        slot = await self._admit(joined, wanted)
        try:
            prepared = await self._prepare(process, slot)
            self._added[prepared.key] = slot
            self._send(prepared, partial(self._collect, prepared.key, slot))
        except BaseException:
            slot.release()
            raise
        return prepared.request_id

    async def step(self) -> list[RequestOutput]:
        """Wait until requests of `add_request` have finished: their last outputs; [] when none is open."""
        while not self._finished:
            await self.check_health()
            if not self._added:
                break
            self._news.clear()
            await self._news.wait()
        finished, self._finished = self._finished, []
        return finished

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests: their generators yield a last output with finish reason "abort". Idempotent."""
        ids = [request_id] if isinstance(request_id, str) else request_id
        self._end(self._output_processor.keys_of(ids), FinishReason.ABORT)

    def check_admission(self, num_requests: int = 1, num_tokens: int = 0) -> None:
        """Raise Overloaded, with retry_after_s, when so many sequences and prompt tokens cannot enter now."""
        self._refuse_when_ending()
        self.admission.check(num_requests, num_tokens)

    async def encode(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Of pooling models: Unsupported."""
        raise refuse_pooling("AsyncLLM.encode()")

    async def check_health(self) -> None:
        """Raise EngineDead when the core has ended."""
        if self._error is not None:
            raise self._error

    async def get_tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None with skip_tokenizer_init."""
        return self.tokenizer

    async def do_log_stats(self) -> None:
        """Log the line of statistics now."""
        self._stats_line.log()

    @property
    def is_running(self) -> bool:
        """True from the end of the start to the end of the core."""
        return bool(self._tasks) and self._error is None

    @property
    def is_stopped(self) -> bool:
        """True when the core has ended."""
        return self._error is not None

    @property
    def errored(self) -> bool:
        """True when the core has ended: nothing can be asked of it any more."""
        return self._error is not None

    @property
    def dead_error(self) -> EngineDead | None:
        """Why it ended."""
        return self._error

    async def shutdown(self, timeout: float | None = None) -> None:
        """End the core; requests still open after `timeout` seconds end with EngineDead. May be called twice.

        timeout: option shutdown_timeout when None. New requests are refused from now on.
        """
        self._is_draining = True
        if self._starting is None:
            return
        await asyncio.wait([self._starting])
        if self._error is None:
            with suppress(TimeoutError, EngineDead):
                await self.wait_for_requests_to_drain(
                    self.config.front.shutdown_timeout if timeout is None else timeout
                )
        self._stats_line.log_end()
        self._fail_all(EngineDead("The engine has been shut down."))
        await self._client.close(_GRACE_S)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _start(self) -> None:
        await self._client.start()
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._log_stats())]

    async def _admit(self, prompt: PromptType, params: SamplingParams | None) -> Slot:
        await self.start()
        self._refuse_when_ending()
        return self.admission.reserve(params.n if params else 1, prompt)

    def _refuse_when_ending(self) -> None:
        if self._error is not None:
            raise self._error
        if self._is_draining:
            raise Overloaded("The engine is shutting down: send the request to another one.")

    async def _prepare(self, process: Callable[[], PreparedRequest], slot: Slot) -> PreparedRequest:
        """Check a request, off the event loop."""
        prepared = await asyncio.to_thread(process)
        slot.set_prompt(len(prepared.prompt_token_ids))
        return prepared

    async def _submit(self, process: Callable[[], PreparedRequest], slot: Slot, put: Receiver) -> str:
        """Check a request and hand it over; its key."""
        prepared = await self._prepare(process, slot)

        def receive(output: RequestOutput) -> None:
            slot.set_prompt(0)
            put(output)

        self._send(prepared, receive)
        return prepared.key

    def _send(self, prepared: PreparedRequest, receiver: Receiver) -> None:
        """Open a request here and in the core, or in neither."""
        if self._error is not None:
            raise self._error
        self._output_processor.add(prepared, receiver)
        try:
            for request in prepared.engine_requests:
                self._client.add(request)
        except BaseException:
            self._send_aborts(self._output_processor.forget([prepared.key]))
            raise

    def _collect(self, key: str, slot: Slot, output: RequestOutput) -> None:
        """Receiver of requests of `add_request`."""
        slot.set_prompt(0)
        if output.finished:
            slot.release()
            self._added.pop(key, None)
            self._finished.append(output)
            self._news.set()

    def _end(self, keys: Iterable[str], reason: FinishReason, error: str = "") -> None:
        self._send_aborts(self._output_processor.end(keys, reason, error).abort_ids)

    async def _call(self, verb: str, arguments: dict[str, Any] | None = None) -> Any:
        await self.start()
        return await self._client.call(verb, arguments)

    async def _read(self) -> None:
        """Task: every output of the core, until it ends."""
        try:
            async for outputs in self._client.outputs():
                self.stats = outputs.stats
                processed = self._output_processor.process(outputs)
                self._send_aborts(processed.abort_ids)
                self._send_requests(processed.new_requests)
        except EngineDead as error:
            logger.error("%s", error)
            self._fail_all(error)
        except Exception as error:
            logger.exception("The front cannot go on.")
            self._fail_all(EngineDead(f"The outputs of the engine cannot be read: {error}"))

    async def _log_stats(self) -> None:
        """Task: the periodic line."""
        while self._stats_line.is_wanted and self._error is None:
            await asyncio.sleep(self._stats_line.interval_s)
            self._stats_line.log_if_due()

    def _send_aborts(self, request_ids: list[str]) -> None:
        if request_ids and self._error is None:
            with suppress(EngineDead):  # the reading task is about to tell everybody
                self._client.abort(request_ids)

    def _send_requests(self, requests: list[EngineRequest]) -> None:
        """Go on with open requests; one that cannot go on ends with an error."""
        for request in requests:
            try:
                self._client.add(request)
            except Overloaded as error:
                if (key := self._output_processor.owner_of(request.request_id)) is not None:
                    self._end([key], FinishReason.ERROR, str(error))

    def _fail_all(self, error: EngineDead) -> None:
        """Every open request ends with the first error, once."""
        self._error = self._error or error
        self._output_processor.forget(self._output_processor.open_keys())
        for stream in self._streams.values():
            stream.fail(self._error)
        for slot in self._added.values():
            slot.release()
        self._added.clear()
        self._news.set()
