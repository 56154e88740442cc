"""`PoolingInput`: prompts for pooling models as requests; many texts become lists, each of them one request.

A part of the input processor. A model that reads a text in one step and keeps nothing is given lists: what a
request costs by itself, on its way through all processes, is more than a small model takes to compute it.
`outputs_of` gives every text its output back.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, count, groupby
from typing import NamedTuple
from uuid import uuid4
from zlib import crc32

import msgspec

from octavo.base.errors import Unsupported
from octavo.config.engine import EngineConfig
from octavo.frontend.outputs.request_output import RequestOutput
from octavo.frontend.requests.adapters import AdapterFiles
from octavo.frontend.requests.media import PromptMedia
from octavo.frontend.requests.options import RequestOptions
from octavo.frontend.requests.pooling import (
    NO_SAMPLING,
    PoolingPrompt,
    as_trained,
    encode_prompt,
    resolve_pooling,
)
from octavo.frontend.requests.prepared import PreparedRequest
from octavo.frontend.requests.prompt_limits import PromptLimits
from octavo.frontend.requests.prompts import ParsedPrompt, PromptType, parse_prompt
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.messages.media import MediaItem
from octavo.messages.pooling import PoolingParams
from octavo.messages.request import EngineRequest, FinishReason, Limits, RequestSpec, Sharing, Text

MAX_TEXTS = 256
"""Of a list: more gain nothing, and keep a list of another front waiting."""


class _Read(NamedTuple):
    """A prompt that was read, and checked."""

    prompt: str | None
    tokens: PoolingPrompt
    salt: str
    media: list[MediaItem]


class PoolingInput:
    """Checks prompts for a pooling model, and makes requests of them. Thread-safe."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        limits: PromptLimits,
        media: PromptMedia,
        adapters: AdapterFiles,
    ) -> None:
        self._config, self._tokenizer, self._limits = config, tokenizer, limits
        self._media, self._adapters = media, adapters
        self._ids = map(f"{uuid4().hex}-{{}}".format, count())
        """For the core: of texts that come by thousands, a random number each takes longer than the rest."""

    def process(
        self,
        prompts: Sequence[PromptType | ParsedPrompt],
        params: PoolingParams,
        options: RequestOptions,
        names: Sequence[str],
        most: int = MAX_TEXTS,
    ) -> list[PreparedRequest]:
        """Return requests for these prompts, in order. most: texts of a list. Raises RequestError."""
        params = resolve_pooling(params, self._config)
        if options.prompt_adapter_request is not None:
            raise Unsupported("Prompt adapters are for models that generate text.")
        every = [self._read(prompt, options) for prompt in prompts]
        assert self._config.pooling is not None
        is_alone = self._config.pooling.is_causal or params.is_per_token or options.lora_request is not None
        prepared: list[PreparedRequest] = []
        place = 0
        for _, group in groupby(every, lambda read: object() if is_alone or read.media else read.salt):
            alike = list(group)
            for start in range(0, len(alike), most):
                reads = alike[start : start + most]
                prepared.append(self._prepare(reads, params, options, names[place : place + len(reads)]))
                place += len(reads)
        return prepared

    def _read(self, prompt: PromptType | ParsedPrompt, options: RequestOptions) -> _Read:
        parsed, pooling = as_trained(parse_prompt(prompt), self._config.pooling), self._config.pooling
        if parsed.embeds is not None:
            raise Unsupported("prompt_embeds are for models that generate text.")
        if parsed.token_ids is None and options.tokenization.truncate_prompt_tokens is None:
            self._limits.check_chars(parsed.text or "")
        most = self._limits.max_model_len
        tokens = encode_prompt(parsed, options.tokenization, self._tokenizer, most, pooling)
        ids, media = self._media.place(tokens.ids, parsed, options)
        self._limits.check(ids, 0, most)
        return _Read(parsed.text, tokens._replace(ids=ids) if media else tokens, parsed.cache_salt, media)

    def _prepare(
        self, reads: list[_Read], params: PoolingParams, options: RequestOptions, names: Sequence[str]
    ) -> PreparedRequest:
        first, is_list = reads[0], len(reads) > 1
        (ids, pair_start, num_instruction), media = first.tokens, first.media
        adapter = self._adapters.resolve(options.lora_request, ids, media)
        spec = RequestSpec(params, 0, [], None, pair_start, num_instruction, adapter, media=media)
        texts: list[Text] = []
        if is_list:
            ids = list(chain.from_iterable(read.tokens.ids for read in reads))
            texts = [Text(len(read.tokens.ids), *read.tokens[1:]) for read in reads]
            spec = RequestSpec(params, 0)
        standing = options.standing()
        if (late := params.late_interaction_params) is not None and standing.data_parallel_rank is None:
            # A query is where its documents are.
            place = crc32(late.query_key.encode()) % self._config.parallel.num_replicas
            standing = msgspec.structs.replace(standing, data_parallel_rank=place)
        reads_cache = not (params.skip_reading_prefix_cache or params.is_per_token)
        request = EngineRequest(
            request_id=next(self._ids),
            prompt_token_ids=ids,
            spec=spec,
            limits=Limits(max_tokens=1),
            standing=standing,
            sharing=Sharing(first.salt, reads_cache, retention=options.kept(self._config.cache)),
            texts=texts,
        )
        return PreparedRequest(
            request_id=names[0],
            prompt=None if is_list else first.prompt,
            prompt_token_ids=ids,
            params=NO_SAMPLING,
            arrival_s=standing.arrival_s,
            engine_requests=[request],
            lora_request=options.lora_request,
            trace_headers=options.trace_headers,
            text_ids=names if is_list else (),
        )


def outputs_of(prepared: Sequence[PreparedRequest], outputs: Sequence[RequestOutput]) -> list[RequestOutput]:
    """Return an output for each prompt, in order, of the last ones of the requests."""
    every: list[RequestOutput] = []
    for request, output in zip(prepared, outputs, strict=True):
        every += _of_texts(request, output) if request.text_ids else [output]
    return every


def _of_texts(prepared: PreparedRequest, output: RequestOutput) -> Iterator[RequestOutput]:
    [made], end = output.outputs, 0
    pooled = output.pooled if made.finish_reason == FinishReason.STOP else None
    failed = partial(replace, made, finish_reason=FinishReason.ERROR.value)
    texts = prepared.engine_requests[0].texts
    for place, (name, text) in enumerate(zip(prepared.text_ids, texts, strict=True)):
        start, end = end, end + text.num_tokens
        error = pooled.errors.get(place) if pooled is not None and pooled.errors else None
        yield RequestOutput(
            name,
            None,
            prepared.prompt_token_ids[start:end],
            None,
            [made if error is None else failed(error=error)],
            output.finished,
            output.metrics,
            num_cached_tokens=output.num_cached_tokens,
            pooled=pooled and pooled.of_text(place),
        )
