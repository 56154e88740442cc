"""`AsyncLLM`: many requests at once on an event loop, the engine core in a process of its own. Public.

The base of servers. Here are the requests; a CoreLink keeps the core, an Operator knows the verbs.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, Unpack
from uuid import uuid4

from octavo.base import log
from octavo.base.errors import EngineDead
from octavo.base.pages import return_large_blocks
from octavo.config import EngineArgs, EngineConfig, resolve
from octavo.config.concerns import resolve_concerns
from octavo.frontend.admission.admission import Admission, Ticket
from octavo.frontend.admission.preparation import Preparation, Unprepared
from octavo.frontend.admission.queue_usage import QueueUsage
from octavo.frontend.client.attached import AttachedClient
from octavo.frontend.client.balanced import make_client
from octavo.frontend.client.door import Door
from octavo.frontend.core_link import GRACE_S, CoreLink
from octavo.frontend.last_outputs import LastOutputs
from octavo.frontend.observe.engine_metrics import EngineMetrics
from octavo.frontend.operated import WeightsOnLoop, on_loop
from octavo.frontend.operator import Operator
from octavo.frontend.output_processor import OutputProcessor
from octavo.frontend.outputs.output_stream import OutputStream, Results
from octavo.frontend.outputs.pooling_output import PoolingOutput, PoolingRequestOutput
from octavo.frontend.outputs.request_output import RequestOutput
from octavo.frontend.requests.conversation import ChatRenderer, Message
from octavo.frontend.requests.input_processor import InputProcessor
from octavo.frontend.requests.options import RequestKeywords, RequestOptions, TokenizationOptions
from octavo.frontend.requests.prepared import PreparedRequest
from octavo.frontend.requests.prompts import PromptType, TextPrompt, TokensPrompt, joined_prompt, with_text
from octavo.frontend.requests.streaming_input import Session, StreamingInput
from octavo.frontend.text.loader import tokenizer_for
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.messages.control import Ready
from octavo.messages.pooling import PoolingParams
from octavo.messages.request import FinishReason
from octavo.messages.sampling import RequestOutputKind, SamplingParams

T = TypeVar("T")
OnCrash = Literal["none", "restart", "replay"]
"""What follows a core that died or hung; `replay`: another one, which goes on with open requests."""


class AsyncLLM(WeightsOnLoop):
    """One engine and its front, used from one event loop."""

    pause_generation = on_loop(Operator.pause_generation)
    resume_generation = on_loop(Operator.resume_generation)
    is_paused = on_loop(Operator.is_paused)
    sleep = on_loop(Operator.sleep)
    wake_up = on_loop(Operator.wake_up)
    is_sleeping = on_loop(Operator.is_sleeping)
    release_kv_cache_memory = on_loop(Operator.release_kv_cache_memory)
    reset_prefix_cache = on_loop(Operator.reset_prefix_cache)
    reset_mm_cache = on_loop(Operator.reset_mm_cache)
    reset_encoder_cache = on_loop(Operator.reset_encoder_cache)
    start_profile = on_loop(Operator.start_profile)
    stop_profile = on_loop(Operator.stop_profile)
    collective_rpc = on_loop(Operator.collective_rpc)
    add_lora = on_loop(Operator.add_lora)
    remove_lora = on_loop(Operator.remove_lora)
    pin_lora = on_loop(Operator.pin_lora)
    list_loras = on_loop(Operator.list_loras)
    add_prompt_adapter = on_loop(Operator.add_prompt_adapter)
    num_lora_users = on_loop(Operator.num_lora_users)
    get_metrics = on_loop(Operator.get_metrics)
    get_supported_tasks = on_loop(Operator.get_supported_tasks)
    is_tracing_enabled = on_loop(Operator.is_tracing_enabled)
    scale_elastic_ep = on_loop(Operator.scale_elastic_ep)

    def __init__(
        self,
        *configs: object,
        on_crash: OnCrash = "none",
        num_fronts: int = 1,
        client: Door | None = None,
        queue_usage: QueueUsage | None = None,
        metrics: EngineMetrics | None = None,
        **named: object,
    ) -> None:
        """Load the tokenizer; the core's process starts with `start` or with the first request.

        configs, named: an EngineConfig, or configs by concern, as in LLMEngine
        on_crash: whether another core follows one that died or hung ("restart", "replay"), and whether open
            requests go on in it as if nothing had happened ("replay") or end with EngineDead
        num_fronts: this one and those that will be `attached`
        client: the door to a core that is there already
        queue_usage: of the queue, shared with its other fronts
        metrics: of the engine before it, which go on; None = new ones
        """
        log.setup_if_asked()
        return_large_blocks()  # bodies and media of requests
        self.config = config = resolve_concerns(*configs, **named)
        self.model_config = config.model
        self.tokenizer = tokenizer_for(config)
        self.input_processor = InputProcessor(config, self.tokenizer)
        self.chat = ChatRenderer(config, self.tokenizer)
        self.metrics = metrics or EngineMetrics(config)
        self.core = CoreLink(
            config,
            client or make_client(config, on_crash != "none", num_fronts),
            OutputProcessor.of(config, self.tokenizer, self.metrics),
            self.metrics,
            learn=self._learn,
            fail=self._fail_open,
            replays=on_crash == "replay",
        )
        self.operator = Operator(config, self.metrics, self.core, self.input_processor.adapters)
        if num_fronts > 1:
            queue_usage = QueueUsage.shared(self.core.mailbox_path, 0, num_fronts)
        self.admission = Admission(config, self.metrics, queue_usage)
        self.streams: dict[str, OutputStream | Results] = {}
        """Of generators, by the requests' keys."""
        self._sessions: dict[Session, str] = {}
        """And the ids that their clients gave them."""
        self._last_outputs = LastOutputs()
        """Of requests of `add_request`, for `step`."""
        self._preparation = Preparation()
        self.input_processor.media.tell(self.metrics.note_media, self.metrics.note_prepared_media)
        self.operator.forget_media = self.input_processor.media.clear
        self.operator.on_scale = partial(setattr, self.input_processor, "num_replicas")

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, usage_context: object = None) -> Self:
        """Decide what the arguments left open.

        usage_context: accepted without effect
        """
        log.setup_if_asked()
        return cls(resolve(engine_args))

    @classmethod
    def from_engine_config(cls, config: EngineConfig) -> Self:
        """The same from a config in which everything is decided."""
        return cls(config)

    @classmethod
    def from_vllm_config(cls, vllm_config: EngineConfig, usage_context: object = None) -> Self:
        """The same under vLLM's name; usage_context is accepted without effect."""
        return cls(vllm_config)

    @classmethod
    def attached(
        cls, config: EngineConfig, mailbox_path: Path, front: int, on_crash: OnCrash = "none"
    ) -> Self:
        """Another front, 1 … num_fronts - 1, of the core whose owner has this `core.mailbox_path`.

        config: the owner's. `start` waits for the core, `shutdown` leaves it alone.
        """
        client, queue_usage = AttachedClient(mailbox_path, front), QueueUsage.shared(mailbox_path, front)
        return cls(config, client=client, queue_usage=queue_usage, on_crash=on_crash)

    def generate(
        self,
        prompt: PromptType | AsyncIterable[StreamingInput],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        prompt_text: str | None = None,
        session_id: str | None = None,
        kv_hints: Any = None,
        ticket: Ticket | None = None,
        **options: Unpack[RequestKeywords],
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of one request, the last with finished=True; closing the generator aborts it.

        prompt: a stream of pieces makes a session of turns (see streaming_input)
        prompt_text: of a prompt of token ids, for the outputs
        session_id, kv_hints: accepted without effect
        ticket: of `reserve`, whose caller releases it; None: one is taken for this request
        Raises RequestError and Overloaded before anything is started, EngineDead when the core ends.
        """
        parsed = RequestOptions.parse(options)
        if isinstance(prompt, AsyncIterable):
            session = Session(prompt, sampling_params, self.input_processor, parsed.tokenization)
            of_turns = replace(parsed, tokenization=TokenizationOptions())
            turn = partial(self._answer, options=of_turns, ticket=ticket)
            return self._hold(session, request_id or uuid4().hex, turn)
        return self._answer(with_text(prompt, prompt_text), sampling_params, request_id, parsed, ticket)

    async def encode(
        self,
        prompt: PromptType,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        ticket: Ticket | None = None,
        **options: Unpack[RequestKeywords],
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """The result of one prompt, of a pooling model. Arguments and errors as in `generate`."""
        parsed = RequestOptions.parse(options)
        answer = self._answer(prompt, pooling_params or PoolingParams(), request_id, parsed, ticket)
        async with aclosing(answer) as outputs:
            async for output in outputs:
                yield PoolingRequestOutput.of(output, PoolingOutput)

    async def _answer(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | PoolingParams | None,
        request_id: str | None,
        options: RequestOptions,
        ticket: Ticket | None,
    ) -> AsyncGenerator[RequestOutput, None]:
        kind = sampling_params.output_kind if isinstance(sampling_params, SamplingParams) else None
        stream = OutputStream(is_delta=kind is RequestOutputKind.DELTA)
        own = await self._admit(prompt, sampling_params) if ticket is None else None
        taken = ticket or own
        assert taken is not None
        key, output = "", None

        def receive(output: RequestOutput) -> None:
            taken.set_prompt(0)
            stream.put(output)

        try:
            await self._check_form(sampling_params, options.tenant)
            prepared = await self._prepare(taken, prompt, sampling_params, options, request_id)
            key = prepared.key
            self.core.open(prepared, receive)
            self.streams[key] = stream
            while output is None or not output.finished:
                output = await stream.get()
                yield output
        finally:
            if own is not None:
                own.release()
            self.streams.pop(key, None)
            self.core.forget([key])

    async def _hold(
        self, session: Session, request_id: str, turn: Callable[..., AsyncGenerator[RequestOutput, None]]
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of a session, whose turns are requests of its id."""
        self._sessions[session] = request_id
        try:
            async with aclosing(session.outputs(partial(turn, request_id=request_id))) as outputs:
                async for output in outputs:
                    yield output
        finally:
            del self._sessions[session]

    async def add_request(  # the early and the present form of vLLM's
        self,
        request_id: str | None = None,
        prompt: PromptType | None = None,
        params: SamplingParams | None = None,
        arrival_time: float | None = None,
        *,
        prompt_token_ids: list[int] | None = None,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[RequestKeywords],
    ) -> str:
        """Start a request whose last output `step` will return; its id (made when None).

        Arguments as in LLMEngine.add_request, errors as in `generate`.
        """
        joined, wanted = joined_prompt(prompt, prompt_token_ids), params or sampling_params
        parsed = RequestOptions.parse(options, arrival_time)
        ticket = await self._admit(joined, wanted)
        try:
            await self._check_form(wanted, parsed.tenant)
            prepared = await self._prepare(ticket, joined, wanted, parsed, request_id)
            self.core.open(prepared, partial(self._last_outputs.receive, prepared.key))
            self._last_outputs.expect(prepared.key, ticket)
        except BaseException:
            ticket.release()
            raise
        return prepared.request_id

    async def step(self) -> list[RequestOutput]:
        """Wait until requests of `add_request` have finished: their last outputs; [] when none is open."""
        return await self._last_outputs.take(self.core.check_awaited)

    async def abort(self, request_id: str | Iterable[str], tenant: str | None = None) -> None:
        """End requests: their generators yield a last output with finish reason "abort". Idempotent.

        tenant: whose they must be; None: anybody's. Those of other fronts end a moment later.
        """
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        if tenant is None:  # sessions have none
            for session in (session for session, name in self._sessions.items() if name in ids):
                session.end()
        self.core.end(self.core.processor.keys_of(ids, tenant), FinishReason.ABORT)
        self.core.tell_fronts(ids, tenant)

    def detach_front(self, front: int) -> None:
        """The process of another front has ended: end its requests. To be said before it is replaced."""
        self.core.detach_front(front)
        self.admission.forget(front)

    async def start(self) -> None:
        """Start the core and wait until the model is loaded; once. Raises ConfigError, EngineDead."""
        await self.core.start()

    def shutdown(self, timeout: float | None = None, grace_s: float = GRACE_S) -> Awaitable[None]:
        """End the core; requests still open after `timeout` seconds end with EngineDead. May be called twice.

        timeout: option shutdown_timeout when None. New requests are refused from now on.
        grace_s: for the core to end by itself. While it still loads, it is ended at once.
        A plain call on the event loop begins it, as vLLM's does; await what it returns to see it done.
        """
        return self.core.shut_down(timeout, grace_s, self.input_processor.close)

    async def check_health(self) -> None:
        """Raise EngineDead when the core has ended."""
        self.core.check_health()

    async def do_log_stats(self) -> None:
        """Log the line of statistics now."""
        self.core.state.line.log()

    async def wait_for_requests_to_drain(self, drain_timeout: float = 300) -> None:
        """Return when no request is open. Raises TimeoutError after `drain_timeout` seconds, EngineDead."""
        await self.core.drain(drain_timeout)

    @property
    def is_running(self) -> bool:
        """True from the end of the start to the end of the core."""
        return self.core.is_up and not self.errored

    @property
    def errored(self) -> bool:
        """True when the core has ended: nothing can be asked of it, unless it is restarted."""
        return self.core.error is not None

    is_stopped = errored

    @property
    def dead_error(self) -> EngineDead | None:
        """Why it ended."""
        return self.core.error

    def check_admission(self, num_requests: int = 1, num_tokens: int = 0) -> None:
        """Raise Overloaded, with retry_after_s, when so many sequences and prompt tokens cannot enter now."""
        self.core.check_open()
        self.admission.check(num_requests, num_tokens)

    def reserve(self, num_sequences: int = 1, prompt: PromptType = "") -> Ticket:
        """A place for a request before any work is done for it: for `generate`, perhaps several times.

        prompt: what there is of it, for an estimate of its length. Raises Overloaded, EngineDead.
        """
        self.core.check_open()
        return self.admission.reserve(num_sequences, prompt)

    async def render(self, messages: Sequence[Message], **options: Any) -> TextPrompt | TokensPrompt:
        """A conversation's prompt, made off the event loop; options of ChatRenderer.render."""
        return await self.off_loop(partial(self.chat.render_prompt, messages, **options))

    async def off_loop(self, work: Callable[[], T], *, is_media: bool = False) -> T:
        """Run what takes time in proportion to a request on a thread; is_media: on one that waits for media.

        Raises RequestError when it takes more than 30 s, Overloaded when it cannot begin in that time.
        """
        return await (self._preparation.run_media(work) if is_media else self._preparation.run(work))

    async def get_tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None with skip_tokenizer_init."""
        return self.tokenizer

    async def _admit(self, prompt: PromptType, params: SamplingParams | PoolingParams | None) -> Ticket:
        await self.start()
        self.core.check_open()
        return self.admission.reserve(params.n if isinstance(params, SamplingParams) else 1, prompt)

    async def _check_form(self, params: SamplingParams | PoolingParams | None, tenant: str) -> None:
        """Have a grammar judged, which may take seconds and uses none of the threads for prompts."""
        if isinstance(params, SamplingParams) and params.structured_outputs is not None:
            verdict = self.input_processor.grammars.ask(params.structured_outputs, tenant)
            await asyncio.shield(asyncio.wrap_future(verdict))

    async def _prepare(self, ticket: Ticket, *request: *Unprepared) -> PreparedRequest:
        """Check a request, off the event loop."""
        prepared = await self._preparation.prepare(self.input_processor, *request)
        ticket.set_prompt(len(prepared.prompt_token_ids))
        return prepared

    def _learn(self, ready: Ready) -> None:
        self.metrics.note_cache(ready.plan.num_blocks)
        self.config = self.config.with_max_model_len(ready.max_model_len)
        self.model_config = self.config.model
        self.input_processor.limits.max_model_len = ready.max_model_len

    def _fail_open(self, error: EngineDead) -> None:
        """End everyone who waits for an output with this error."""
        for stream in self.streams.values():
            stream.fail(error)
        for session in self._sessions:
            session.end(error)
        self._last_outputs.fail()
