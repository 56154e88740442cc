"""POST /v1/completions. What is special about completions; the engine's part is `generation`."""

import time
from collections.abc import Iterator, Sequence
from functools import partial

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from octavo.frontend.outputs.logprobs import PositionLogprobs
from octavo.frontend.outputs.request_output import CompletionOutput, RequestOutput
from octavo.frontend.outputs.routed_experts import written
from octavo.serving.body import read_body
from octavo.serving.caller import Caller
from octavo.serving.openai.answers import Completion, CompletionChoice, CompletionLogprobs, Logprobs
from octavo.serving.openai.generation import Generation
from octavo.serving.openai.logprobs import logprob_writer, prompt_logprobs
from octavo.serving.openai.prompts import prompts_of
from octavo.serving.openai.protocol import CompletionRequest
from octavo.serving.openai.usage import Meter
from octavo.serving.registry import Route


class CompletionAnswer:
    """The answer to one request, of one prompt or several."""

    def __init__(self, caller: Caller, request: CompletionRequest, answer_id: str) -> None:
        self._meter = Meter(request, caller.config)
        self._tokenizer = caller.engine.tokenizer
        self._request = request
        self._make = partial(Completion, id=answer_id, created=int(time.time()), model=caller.model)
        self._is_scoring = request.max_tokens == 0
        """The engine makes one token at least, which is not shown then."""
        self._logprobs = logprob_writer(caller, request, request.logprobs)
        self._num_chars: dict[int, int] = {}
        """By choice: of its text so far, as its tokens are spelled. One that is not here has not begun."""

    def whole(self, outputs: Sequence[RequestOutput]) -> Completion:
        """The answer, from the last outputs of all prompts."""
        choices = [choice for index, output in enumerate(outputs) for choice in self._choices(index, output)]
        return self._make(
            choices=choices,
            usage=self._meter.usage(),
            metrics=self._meter.metrics(),
            kv_transfer_params=outputs[0].kv_transfer_params,
        )

    def chunks(self, index: int, output: RequestOutput) -> Iterator[Completion]:
        """What a new output of prompt `index` adds to the stream."""
        for choice in self._choices(index, output):
            if choice.text or choice.finish_reason or choice.logprobs or choice.token_ids:
                yield self._make(choices=[choice], usage=self._meter.of_chunk())

    def last_chunk(self) -> Completion | None:
        """Usage, if it was asked for."""
        if not self._meter.shows_end:
            return None
        return self._make(choices=[], usage=self._meter.usage(), metrics=self._meter.metrics())

    def _choices(self, index: int, output: RequestOutput) -> list[CompletionChoice]:
        self._meter.count(index, output, 0 if self._is_scoring else None)
        first = index * (self._request.n or 1)
        return [self._choice(first + completion.index, completion, output) for completion in output.outputs]

    def _choice(self, number: int, completion: CompletionOutput, output: RequestOutput) -> CompletionChoice:
        begins = number not in self._num_chars
        offset = self._num_chars.setdefault(number, 0)
        prompt_ids = output.prompt_token_ids or []
        echoes = begins and bool(self._request.echo)
        text = "" if self._is_scoring else completion.text
        return CompletionChoice(
            number,
            self._prompt_text(output) + text if echoes else text,
            self._written_logprobs(number, completion, output, offset, echoes=echoes),
            completion.finish_reason,  # type: ignore[arg-type]  # the others were raised as errors
            None if self._is_scoring else completion.stop_reason,
            self._ids([] if self._is_scoring else list(completion.token_ids)),
            self._ids(prompt_ids) if begins else None,
            self._prompt_scores(output),
            completion.weight_versions or UNSET,
            written(completion.routed_experts) or UNSET,
            self._meter.drafts(completion),
        )

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(output.prompt_token_ids or [], skip_special_tokens=False)

    def _ids(self, ids: list[int]) -> list[int] | None:
        return ids if self._request.return_token_ids else None

    def _prompt_scores(self, output: RequestOutput) -> list[Logprobs | None] | None:
        if self._request.prompt_logprobs is None or output.prompt_logprobs is None:
            return None
        return prompt_logprobs(output.prompt_logprobs)

    def _written_logprobs(
        self, number: int, completion: CompletionOutput, output: RequestOutput, offset: int, *, echoes: bool
    ) -> CompletionLogprobs | None:
        """Of the new tokens, after those of an echoed prompt."""
        if self._logprobs is None:
            return None
        ids: list[int] = []
        positions: list[PositionLogprobs | None] = []
        if echoes and output.prompt_logprobs is not None:
            ids += output.prompt_token_ids or []
            positions += output.prompt_logprobs
        if not self._is_scoring and completion.logprobs is not None:
            ids += completion.token_ids
            positions += completion.logprobs
        if not ids:
            return None
        written = self._logprobs.completion(ids, positions, offset)
        self._num_chars[number] = written.text_offset[-1] + len(written.tokens[-1])
        return written


async def create_completion(request: Request) -> Response:
    """The text that follows each prompt, whole or as a stream of chunks."""
    caller = Caller.of(request)
    body = await read_body(request, CompletionRequest, takes_place=True)
    generation, answer = prepare(caller, body)
    return await generation.response(request, answer)


def prepare(caller: Caller, body: CompletionRequest) -> tuple[Generation, CompletionAnswer]:
    """The engine's work for a checked body, and the form of its answer. Nothing is started yet.

    Raises RequestError.
    """
    tokenizer = caller.asking(body.model).engine.tokenizer
    generation = Generation.of(caller, body, "cmpl", prompts_of(body, tokenizer))
    return generation, CompletionAnswer(generation.caller, body, generation.request_id)


ROUTES = [Route("/v1/completions", create_completion, CompletionRequest, Completion, streams=True)]
