"""`Generation`: the engine's work for one HTTP request, of one prompt or many; used by all that writes.

Places in the engine are reserved before any prompt is rendered or tokenized, all of them or none. A request
of many prompts holds as many places as the engine has seats at most: its prompts take turns on them, so that
a long list is slow and not refused.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from octavo.base.errors import RequestError
from octavo.base.foreign import NOT_WRITING
from octavo.frontend.admission.admission import Ticket
from octavo.frontend.outputs.request_output import RequestOutput
from octavo.frontend.requests.prompts import PromptType
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.messages.sampling import SamplingParams
from octavo.serving.caller import Caller
from octavo.serving.errors import HTTPError
from octavo.serving.openai.answers import encode
from octavo.serving.openai.protocol import ChatRequest, SamplingFields
from octavo.serving.openai.sampling import sampling_params, tokenization
from octavo.serving.streaming import DONE, EventStream, event, leaving, unless_gone

MAX_SEQUENCES = 16384
"""Of one HTTP request: prompts times n."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages that are still to be rendered, with the renderer's options."""

    messages: Sequence[Mapping[str, Any]]
    options: Mapping[str, Any]
    kept: Sequence[Mapping[str, Any]] | None = None
    """The part that is to stay in the prefix cache; None = all, if retention_s asks for any."""


class ChunkedAnswer(Protocol):
    """An answer that can be told whole, or piece by piece."""

    def whole(self, outputs: Sequence[RequestOutput]) -> Struct:
        """From the last outputs of all prompts."""

    def chunks(self, index: int, output: RequestOutput) -> Iterable[Struct]:
        """What a new output of prompt `index` adds."""

    def last_chunk(self) -> Struct | None:
        """What comes after all outputs."""


@dataclass(frozen=True, slots=True)
class Generation:
    """Prompts to be answered alike."""

    caller: Caller
    request: SamplingFields
    request_id: str
    """The answer's; the engine's too, with the prompt's number from the second prompt on."""
    prompts: Sequence[PromptType | Conversation]
    params: SamplingParams
    tokenization: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        caller: Caller,
        request: SamplingFields,
        kind: str,
        prompts: Sequence[PromptType | Conversation],
        *,
        add_special_tokens: bool = True,
    ) -> "Generation":
        """As a checked body asks for it; kind: what its name begins with. Nothing is started yet.

        Raises RequestError.
        """
        caller = caller.asking(request.model, request.lora)
        if caller.engine.config.pooling is not None:
            raise RequestError(NOT_WRITING, "model")
        return cls(
            caller,
            request,
            f"{kind}-{request.request_id or caller.request_id}",
            prompts,
            sampling_params(request, caller.engine.input_processor.default_sampling_values()),
            tokenization(request, add_special_tokens=add_special_tokens),
        )

    def __post_init__(self) -> None:
        num_sequences = len(self.prompts) * self.params.num_sequences
        if num_sequences > MAX_SEQUENCES:
            raise RequestError(
                f"{len(self.prompts)} prompts times n={self.params.num_sequences} are {num_sequences} "
                f"sequences; one request may ask for {MAX_SEQUENCES}.",
                "n",
            )

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Outputs with the number of their prompt, in the order in which they come; close it to abort all.

        Raises RequestError and Overloaded before the first, EngineDead and HTTPError (timeout …) at any time.
        """
        engine, num_sequences = self.caller.engine, self.params.num_sequences
        width = max(1, engine.config.scheduler.max_num_seqs // num_sequences)
        with ExitStack() as reserved:
            tickets = [
                reserved.enter_context(engine.reserve(num_sequences, _text_of(prompt)))
                for prompt in self.prompts[:width]
            ]
            outputs = self._one(0, tickets[0]) if len(self.prompts) == 1 else self._in_turns(tickets)
            async with aclosing(outputs):
                async for index, output in outputs:
                    fault = take_fault(output)
                    yield index, output
                    if fault is not None:
                        raise fault

    async def events(self, answer: ChunkedAnswer) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events, [DONE] included."""
        async with aclosing(self.outputs()) as outputs:
            async for index, output in outputs:
                if data := b"".join([event(encode(chunk)) for chunk in answer.chunks(index, output)]):
                    yield data
        if (last := answer.last_chunk()) is not None:
            yield event(encode(last))
        yield DONE

    async def response(self, request: Request, answer: ChunkedAnswer) -> Response:
        """The answer, as a stream if that was asked for.

        Raises ClientGone when nobody waits for it any more, and what `outputs` raises.
        """
        if self.request.stream:
            return EventStream(self.events(answer), self.caller.config)
        return await self.whole_response(request, answer.whole)

    async def whole_response(self, request: Request, whole: Callable[..., Struct]) -> Response:
        """The answer in one piece, made by `whole` from the last outputs of all prompts."""
        content = await unless_gone(leaving(request.receive), self.content(whole))
        return Response(content, media_type="application/json")

    async def content(self, whole: Callable[[list[RequestOutput]], Struct]) -> bytes:
        """The answer as JSON, made by `whole`; raises what `outputs` raises."""
        outputs = await self.results()
        if self.params.logprobs is None and self.params.prompt_logprobs is None:
            return encode(whole(outputs))
        return await self.caller.engine.off_loop(lambda: encode(whole(outputs)))  # much to write

    async def results(self) -> list[RequestOutput]:
        """The last output of each prompt."""
        async with aclosing(self.outputs()) as outputs:
            last = {index: output async for index, output in outputs}
        return [last[index] for index in range(len(self.prompts))]

    async def _one(self, index: int, ticket: Ticket) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        request, caller = self.request, self.caller
        prompt = await self._rendered(self.prompts[index])
        kept = await self._num_kept(self.prompts[index], prompt)
        outputs = caller.engine.generate(
            prompt,
            self.params,
            f"{self.request_id}-{index}" if index else self.request_id,
            tokenization_kwargs=self.tokenization,
            trace_headers=caller.trace_headers,
            priority=request.priority or 0,
            tenant=caller.tenant,
            deadline_s=request.deadline_s,
            retention_s=request.retention_s,
            prefix_priority=request.prefix_priority,
            retention_tokens=kept,
            speculative=request.speculative,
            in_bulk=caller.is_in_bulk(len(self.prompts)),
            mm_processor_kwargs=_processor_kwargs(request),
            data_parallel_rank=caller.data_parallel_rank,
            kv_transfer_params=request.kv_transfer_params,
            ticket=ticket,
            lora_request=caller.lora,
            prompt_adapter_request=caller.learned_prompt,
        )
        async with aclosing(outputs):
            async for output in outputs:
                yield index, output

    async def _rendered(self, prompt: PromptType | Conversation) -> PromptType:
        if isinstance(prompt, Conversation):
            prompt = await self.caller.engine.render(prompt.messages, **prompt.options)
        return self.caller.salted(prompt, self.request.cache_salt)

    async def _num_kept(self, source: PromptType | Conversation, prompt: Any) -> int | None:
        """How many tokens of the prompt its conversation's `kept` part has in common with it; None = all."""
        if not isinstance(source, Conversation) or source.kept is None or "prompt" not in prompt:
            return None
        engine = self.caller.engine
        options = {**source.options, "add_generation_prompt": False, "continue_final_message": False}
        try:
            part: Any = await engine.render(source.kept, **options)
        except RequestError:
            return None  # the template asks for more messages
        tokenizer = await engine.get_tokenizer()
        assert tokenizer is not None
        return await engine.off_loop(
            partial(_num_common, tokenizer, part.get("prompt", ""), prompt["prompt"])
        )

    async def _in_turns(self, tickets: list[Ticket]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """One task per ticket takes prompt after prompt; what they bring meets in a queue of one."""
        queue: asyncio.Queue[tuple[int, RequestOutput] | Exception | None] = asyncio.Queue(1)
        todo = iter(range(len(self.prompts)))

        async def work_off(ticket: Ticket) -> None:
            try:
                for index in todo:
                    async with aclosing(self._one(index, ticket)) as outputs:
                        async for item in outputs:
                            await queue.put(item)
            except Exception as error:
                await queue.put(error)
            else:
                await queue.put(None)

        tasks = [asyncio.create_task(work_off(ticket)) for ticket in tickets]
        num_open = len(tasks)
        try:
            while num_open:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    num_open -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def take_fault(output: RequestOutput) -> HTTPError | None:
    """A sequence that came to no good end: an error of the whole request, once its text so far is told."""
    fault = None
    for completion in output.outputs:
        match completion.finish_reason:
            case "timeout":
                fault = HTTPError(
                    504, "The request took longer than its timeout, or the server's limit, allows."
                )
            case "abort":
                fault = HTTPError(499, "The request was aborted.")
            case "error":
                fault = HTTPError(500, completion.error or "Internal error while generating.")
            case _:
                continue
        completion.finish_reason = None
    return fault


def _text_of(prompt: PromptType | Conversation) -> PromptType:
    if not isinstance(prompt, Conversation):
        return prompt
    return "".join(m["content"] for m in prompt.messages if isinstance(m.get("content"), str))


def _processor_kwargs(request: SamplingFields) -> dict[str, Any]:
    if not isinstance(request, ChatRequest):
        return {}
    return (request.media_io_kwargs or {}).get("video", {}) | (request.mm_processor_kwargs or {})


def _num_common(tokenizer: Tokenizer, part: str, whole: str) -> int:
    """Return the number of tokens of the beginning that two texts have in common."""
    pairs = enumerate(zip(part, whole, strict=False))
    length = next((place for place, (a, b) in pairs if a != b), min(len(part), len(whole)))
    return len(tokenizer.encode(whole[:length], add_special_tokens=False))
