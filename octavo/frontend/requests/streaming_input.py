"""`StreamingInput`: a prompt that comes in pieces, as the argument of `AsyncLLM.generate`.

A session of turns. Each piece is appended to what stands so far, and answered; the answer stands before the
next piece, but for its last token: nothing has been computed from it yet. A turn is a request of its own, so
what holds for requests holds for turns, and what was computed before is found in the prefix cache. The next
piece is asked for when the turn has ended. Semantics: vLLM's streaming input (its pull request 28973).
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

from octavo.base.errors import RequestError, Unsupported
from octavo.frontend.outputs.request_output import CompletionOutput, RequestOutput
from octavo.frontend.requests.input_processor import InputProcessor
from octavo.frontend.requests.options import TokenizationOptions
from octavo.frontend.requests.prompts import PromptType, TokensPrompt, parse_prompt
from octavo.messages.request import FinishReason
from octavo.messages.sampling import RequestOutputKind, SamplingParams


@dataclass(slots=True)
class StreamingInput:
    """A piece of a prompt, and how to answer it; None: as the session does."""

    prompt: PromptType
    sampling_params: SamplingParams | None = None


RunTurn = Callable[[TokensPrompt, SamplingParams | None], AsyncGenerator[RequestOutput, None]]
"""Answers a whole prompt, as `AsyncLLM.generate` does."""


class Session:
    """One stream of pieces, and the prompt that grows of them. Used on one event loop."""

    def __init__(
        self,
        pieces: AsyncIterable[StreamingInput],
        params: SamplingParams | None,
        processor: InputProcessor,
        options: TokenizationOptions,
    ) -> None:
        """params: of the pieces that bring none. Raises RequestError."""
        self._pieces = aiter(pieces)
        self._params = params
        self._processor = processor
        self._options = options
        if self._options.truncate_prompt_tokens is not None:
            raise RequestError("A prompt that comes in pieces cannot be truncated.", "truncate_prompt_tokens")
        self._token_ids: list[int] = []
        self._cache_salt = ""
        self._over = asyncio.Event()
        self._error: Exception | None = None

    def end(self, error: Exception | None = None) -> None:
        """Take no further piece, and raise `error` if there is one. A running turn ends like any request."""
        self._error = error
        self._over.set()

    async def outputs(self, run_turn: RunTurn) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of all turns, each with the prompt so far; only the last has finished=True.

        A turn ends with a finish reason. When the pieces end, its last output comes once more, finished and
        without a new token. A session without a piece has no outputs.
        """
        output: RequestOutput | None = None
        is_delta = False
        try:
            while (piece := await self._next()) is not None:
                await self._append(piece.prompt)
                params = _checked(piece.sampling_params or self._params)
                is_delta = params is not None and params.output_kind is RequestOutputKind.DELTA
                answer: list[int] = []
                async with aclosing(run_turn(self._prompt(), params)) as turn:
                    async for output in turn:
                        [sequence] = output.outputs
                        answer = [*answer, *sequence.token_ids] if is_delta else list(sequence.token_ids)
                        is_over = sequence.finish_reason in (FinishReason.ABORT, FinishReason.ERROR)
                        yield replace(output, finished=is_over)  # the turn still reads its own
                        if is_over:
                            return
                self._token_ids += answer[:-1]
            if output is not None:
                yield self._farewell(output, is_delta=is_delta)
        finally:
            if isinstance(self._pieces, AsyncGenerator):
                await self._pieces.aclose()

    async def _next(self) -> StreamingInput | None:
        """The next piece; None when none follows or the session was ended. Raises what the stream raises."""
        coming = asyncio.ensure_future(anext(self._pieces, None))
        over = asyncio.ensure_future(self._over.wait())
        try:
            await asyncio.wait((coming, over), return_when=asyncio.FIRST_COMPLETED)
            if self._error is not None:
                raise self._error
            piece = None if self._over.is_set() else coming.result()
        finally:
            coming.cancel()
            over.cancel()
            await asyncio.wait((coming, over))  # the stream must have stopped before it is closed
        if piece is not None and not isinstance(piece, StreamingInput):
            raise RequestError(
                f"A prompt that comes in pieces must yield StreamingInput, got {type(piece).__name__}.",
                "prompt",
            )
        return piece

    async def _append(self, prompt: PromptType) -> None:
        parsed = parse_prompt(prompt)
        if parsed.embeds is not None:
            raise Unsupported(
                "A prompt that comes in pieces is made of text or token ids, not prompt_embeds."
            )
        self._cache_salt = self._cache_salt or parsed.cache_salt
        ids = parsed.token_ids
        if ids is None:
            ids = await asyncio.to_thread(self._processor.tokenize, parsed.text or "", self._options)
        self._token_ids += ids
        self._options = replace(self._options, add_special_tokens=False)  # the text has begun

    def _prompt(self) -> TokensPrompt:
        prompt = TokensPrompt(prompt_token_ids=list(self._token_ids))
        if self._cache_salt:
            prompt["cache_salt"] = self._cache_salt
        return prompt

    def _farewell(self, output: RequestOutput, *, is_delta: bool) -> RequestOutput:
        """The last output of the last turn, as the session's."""
        [sequence] = output.outputs
        reason = FinishReason.ABORT.value if self._over.is_set() else sequence.finish_reason
        if is_delta:
            sequence = CompletionOutput(sequence.index, "", [], stop_reason=sequence.stop_reason)
        return replace(output, finished=True, outputs=[replace(sequence, finish_reason=reason)])


def _checked(params: SamplingParams | None) -> SamplingParams | None:
    if params is not None and (params.num_sequences > 1 or params.use_beam_search):
        raise RequestError(
            "A prompt that comes in pieces goes on with one answer: use n=1, without best_of or beam search.",
            "n",
        )
    return params
