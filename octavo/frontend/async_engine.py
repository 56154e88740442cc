"""`AsyncLLM`: many requests at once on an event loop, the engine core in a process of its own. Public.

The base of servers. Here are the requests; the core's life is the business of async_lifecycle.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn, Self, TypeVar
from uuid import uuid4

from octavo.base.errors import EngineDead
from octavo.config import EngineArgs, EngineConfig, resolve
from octavo.config.concerns import resolve_concerns
from octavo.frontend.admission import Admission, Slot
from octavo.frontend.async_lifecycle import AsyncLifecycle
from octavo.frontend.client.attached import AttachedClient
from octavo.frontend.client.door import Door
from octavo.frontend.client.restart import RestartPolicy
from octavo.frontend.client.zmq import AsyncClient
from octavo.frontend.conversation import ChatRenderer, Message
from octavo.frontend.input_processor import InputProcessor, PreparedRequest
from octavo.frontend.later import refuse_options, refuse_pooling
from octavo.frontend.occupancy import Occupancy
from octavo.frontend.open_request import Receiver
from octavo.frontend.output_stream import OutputStream
from octavo.frontend.outputs import RequestOutput
from octavo.frontend.preparation import Preparation
from octavo.frontend.prompts import PromptType, TextPrompt, joined_prompt, with_text
from octavo.frontend.streaming_input import Session, StreamingInput
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.messages.control import Ready
from octavo.messages.request import FinishReason
from octavo.messages.sampling import RequestOutputKind, SamplingParams

T = TypeVar("T")


class AsyncLLM(AsyncLifecycle):
    """One engine and its front, used from one event loop."""

    def __init__(
        self,
        *configs: object,
        on_crash: Literal["none", "restart"] = "none",
        num_fronts: int = 1,
        client: Door | None = None,
        occupancy: Occupancy | None = None,
        **named: object,
    ) -> None:
        """Load the tokenizer; the core's process starts with `start` or with the first request.

        configs, named: an EngineConfig, or configs by concern, as in LLMEngine
        on_crash: whether another core follows one that died or hung
        num_fronts: this one and those that will be `attached`
        client: the door to a core that is there already
        occupancy: of the queue, shared with its other fronts
        """
        config = resolve_concerns(*configs, **named)
        restarts = RestartPolicy() if on_crash == "restart" else None
        super().__init__(config, client or AsyncClient(config, restarts, num_fronts))
        self.model_config = self.config.model
        self.input_processor = InputProcessor(self.config, self.tokenizer)
        self.chat = ChatRenderer(self.config, self.tokenizer)
        if num_fronts > 1:
            occupancy = Occupancy.shared(self.mailbox_path, 0, num_fronts)
        self.admission = Admission(self.config, self.metrics, occupancy)
        self._streams: dict[str, OutputStream] = {}
        """Of generators, by the requests' keys."""
        self._sessions: dict[Session, str] = {}
        """And the ids that their clients gave them."""
        self._added: dict[str, Slot] = {}
        """Requests of `add_request`, by key."""
        self._finished: list[RequestOutput] = []
        """Their last outputs, for `step`."""
        self._news = asyncio.Event()
        self._preparation = Preparation()

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> Self:
        """Decide what the arguments left open."""
        return cls(resolve(args))

    @classmethod
    def from_engine_config(cls, config: EngineConfig) -> Self:
        """The same from a config in which everything is decided."""
        return cls(config)

    from_vllm_config = from_engine_config

    @classmethod
    def attached(cls, config: EngineConfig, mailbox_path: Path, front: int) -> Self:
        """Another front, 1 … num_fronts - 1, of the core whose owner has this `mailbox_path`.

        config: the owner's. `start` waits for the core, `shutdown` leaves it alone.
        """
        occupancy = Occupancy.shared(mailbox_path, front)
        return cls(config, client=AttachedClient(mailbox_path, front), occupancy=occupancy)

    def generate(  # noqa: PLR0913  # vLLM's signature
        self,
        prompt: PromptType | AsyncIterable[StreamingInput],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        prompt_text: str | None = None,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        kv_hints: Any = None,
        tenant: str = "",
        deadline_s: float | None = None,
        slot: Slot | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of one request, the last with finished=True; closing the generator aborts it.

        prompt: a stream of pieces makes a session of turns (see streaming_input)
        prompt_text: of a prompt of token ids, for the outputs
        trace_headers: `traceparent` and `tracestate`, the caller's place in a trace (otlp_traces_endpoint)
        session_id, kv_hints: accepted without effect
        tenant, deadline_s: for the scheduling policies "fair" and "deadline" (seconds after the arrival)
        slot: of `reserve`, whose caller releases it; None: one is taken for this request
        Raises RequestError and Overloaded before anything is started, EngineDead when the core ends.
        """
        del session_id, kv_hints
        refuse_options(lora_request, data_parallel_rank=data_parallel_rank)
        about: dict[str, Any] = {
            "priority": priority,
            "tenant": tenant,
            "deadline_s": deadline_s,
            "trace_headers": trace_headers,
        }
        if isinstance(prompt, AsyncIterable):
            session = Session(prompt, sampling_params, self.input_processor, tokenization_kwargs)
            turn = partial(self.generate, slot=slot, **about)
            return self._hold(session, request_id or uuid4().hex, turn)
        process = partial(
            self.input_processor.process,
            with_text(prompt, prompt_text),
            sampling_params,
            request_id=request_id,
            tokenization_kwargs=tokenization_kwargs,
            **about,
        )
        return self._answer(process, prompt, sampling_params, slot)

    async def _answer(
        self,
        process: Callable[[], PreparedRequest],
        prompt: PromptType,
        sampling_params: SamplingParams | None,
        slot: Slot | None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of the request that `process` makes of this prompt."""
        kind = sampling_params.output_kind if sampling_params else None
        stream = OutputStream(is_delta=kind is RequestOutputKind.DELTA)
        own = await self._admit(prompt, sampling_params) if slot is None else None
        taken = slot or own
        assert taken is not None
        key, output = "", None
        try:
            await self._check_form(sampling_params)
            key = await self._submit(process, taken, stream.put)
            self._streams[key] = stream
            while output is None or not output.finished:
                output = await stream.get()
                yield output
        finally:
            if own is not None:
                own.release()
            self._streams.pop(key, None)
            self._send_aborts(self._output_processor.forget([key]))

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
            trace_headers=trace_headers,
        )
        slot = await self._admit(joined, wanted)
        try:
            await self._check_form(wanted)
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

    async def abort(self, request_id: str | Iterable[str], tenant: str | None = None) -> None:
        """End requests: their generators yield a last output with finish reason "abort". Idempotent.

        tenant: whose they must be; None: anybody's. Those of other fronts end a moment later.
        """
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        if tenant is None:  # sessions have none
            for session in (session for session, name in self._sessions.items() if name in ids):
                session.end()
        self._end(self._output_processor.keys_of(ids, tenant), FinishReason.ABORT)
        self._tell_fronts(ids, tenant)

    def detach_front(self, front: int) -> None:
        """The process of another front has ended: end its requests. To be said before it is replaced."""
        super().detach_front(front)
        self.admission.forget(front)

    def check_admission(self, num_requests: int = 1, num_tokens: int = 0) -> None:
        """Raise Overloaded, with retry_after_s, when so many sequences and prompt tokens cannot enter now."""
        self._refuse_when_ending()
        self.admission.check(num_requests, num_tokens)

    def reserve(self, num_sequences: int = 1, prompt: PromptType = "") -> Slot:
        """A place for a request before any work is done for it: for `generate`, perhaps several times.

        prompt: what there is of it, for an estimate of its length. Raises Overloaded, EngineDead.
        """
        self._refuse_when_ending()
        return self.admission.reserve(num_sequences, prompt)

    async def render(self, messages: Sequence[Message], **options: Any) -> TextPrompt:
        """A conversation's prompt, made off the event loop; options of ChatRenderer.render_text."""
        return await self.off_loop(partial(self.chat.render_text, messages, **options))

    async def off_loop(self, work: Callable[[], T]) -> T:
        """Run what takes time in proportion to a request on a thread.

        Raises RequestError when it takes more than 30 s, Overloaded when it cannot begin in that time.
        """
        return await self._preparation.run(work)

    async def encode(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Of pooling models: Unsupported."""
        raise refuse_pooling("AsyncLLM.encode()")

    async def get_tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None with skip_tokenizer_init."""
        return self.tokenizer

    async def _admit(self, prompt: PromptType, params: SamplingParams | None) -> Slot:
        await self.start()
        self._refuse_when_ending()
        return self.admission.reserve(params.n if params else 1, prompt)

    async def _check_form(self, params: SamplingParams | None) -> None:
        """Have a grammar judged, which may take seconds and uses none of the threads for prompts."""
        if params is not None and params.structured_outputs is not None:
            verdict = self.input_processor.grammars.ask(params.structured_outputs)
            await asyncio.shield(asyncio.wrap_future(verdict))

    async def _prepare(self, process: Callable[[], PreparedRequest], slot: Slot) -> PreparedRequest:
        """Check a request, off the event loop."""
        prepared = await self.off_loop(process)
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

    def _learn(self, ready: Ready) -> None:
        super()._learn(ready)
        self.model_config = self.config.model
        self.input_processor.max_model_len = ready.max_model_len

    def _fail_open(self, error: EngineDead) -> None:
        for stream in self._streams.values():
            stream.fail(error)
        for session in self._sessions:
            session.end(error)
        for slot in self._added.values():
            slot.release()
        self._added.clear()
        self._news.set()
