"""`pool`: the results of many prompts at once, on an event loop. For servers of pooling models.

One reservation, one pass of the tokenizer over all texts, and one wake-up for all results: what every request
would cost by itself is more than a small model takes to compute it.
"""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Unpack

from octavo.frontend.async_engine import AsyncLLM
from octavo.frontend.outputs.output_stream import Results
from octavo.frontend.outputs.request_output import RequestOutput
from octavo.frontend.requests.long_texts import Pieces
from octavo.frontend.requests.options import RequestKeywords, RequestOptions
from octavo.frontend.requests.pooling_input import outputs_of
from octavo.frontend.requests.prompts import PromptType
from octavo.messages.pooling import PoolingParams

_SHORT = 500  # characters whose tokens are there sooner than a thread


async def pool(
    engine: AsyncLLM,
    prompts: Sequence[PromptType],
    params: PoolingParams,
    request_id: str,
    **options: Unpack[RequestKeywords],
) -> list[RequestOutput]:
    """Return the last output of each prompt, in order; a request that fails is an output with an error.

    Prompt i is named request_id-i. Raises RequestError for any of them, Overloaded and EngineDead.
    """
    parsed = RequestOptions.parse(options)
    await engine.start()
    pooling = engine.config.pooling
    if pooling is None or not pooling.enable_chunked_processing:
        return await _pool(engine, prompts, [params] * len(prompts), parsed, request_id)
    given = engine.input_processor, pooling, prompts, [params] * len(prompts), parsed.tokenization
    pieces = await engine.off_loop(partial(Pieces, *given))
    return pieces.joined(await _pool(engine, pieces.prompts, pieces.params, parsed, request_id))


async def _pool(
    engine: AsyncLLM,
    prompts: Sequence[PromptType],
    params: Sequence[PoolingParams],
    parsed: RequestOptions,
    request_id: str,
) -> list[RequestOutput]:
    media = engine.input_processor.media
    if any(map(media.is_in, prompts)):
        prompts = await asyncio.gather(*(_read(engine, prompt, parsed) for prompt in prompts))
    seats = min(len(prompts), engine.config.scheduler.max_num_seqs)
    with engine.reserve(seats, max(prompts, key=len, default="")) as ticket:
        names = [f"{request_id}-{index}" for index in range(len(prompts))]
        given = prompts, params, [parsed] * len(prompts), names
        prepare = partial(engine.input_processor.process_all, *given)
        is_short = len(prompts) == 1 and isinstance(prompts[0], str) and len(prompts[0]) <= _SHORT
        prepared = prepare() if is_short else await engine.off_loop(prepare)
        ticket.set_prompt(sum(len(request.prompt_token_ids) for request in prepared))
        results, keys = Results(len(prepared)), [request.key for request in prepared]
        try:
            for index, request in enumerate(prepared):
                engine.core.open(request, partial(results.put, index))
                engine.streams[request.key] = results
            outputs = await results.get()
        finally:
            for key in keys:
                engine.streams.pop(key, None)
            engine.core.forget(keys)
    return outputs_of(prepared, outputs)


async def _read(engine: AsyncLLM, prompt: PromptType, options: RequestOptions) -> PromptType:
    """Return a prompt whose images are read, on threads of their own."""
    media = engine.input_processor.media
    if not media.is_in(prompt):
        return prompt
    return await engine.off_loop(partial(media.read, prompt, options), is_media=True)
