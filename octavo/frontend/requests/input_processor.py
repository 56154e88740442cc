"""`InputProcessor`: a prompt and its parameters, checked and completed, as `EngineRequest`s.

Called by every front (offline, asynchronous, HTTP, batch files): all limits and cross-field checks of a
request are here and in `SamplingParams`, so later wings may assert. It never changes what the user gave it,
and keeps nothing between requests. Names, rules and texts follow vLLM's.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import Any
from uuid import uuid4

import msgspec

from octavo.base.errors import BadCheckpoint, RequestError, wrong
from octavo.base.foreign import NOT_WRITING
from octavo.config.engine import EngineConfig
from octavo.config.kv_transfer import passes_on
from octavo.config.model import NO_GENERATION_CONFIG
from octavo.frontend.beam_search.params import check_beam_search, first_step
from octavo.frontend.requests.adapters import AdapterFiles
from octavo.frontend.requests.conversation import ChatRenderer
from octavo.frontend.requests.grammar_check import GrammarCheck
from octavo.frontend.requests.kv_transfer import read_transfer
from octavo.frontend.requests.media import PromptMedia
from octavo.frontend.requests.options import NO_OPTIONS, RequestOptions, TokenizationOptions
from octavo.frontend.requests.pooling import as_trained, encode_prompt
from octavo.frontend.requests.pooling_input import MAX_TEXTS, PoolingInput
from octavo.frontend.requests.prepared import PreparedRequest
from octavo.frontend.requests.prompt_embeds import placeholder_ids
from octavo.frontend.requests.prompt_limits import PromptLimits
from octavo.frontend.requests.prompt_scoring import check_prompt_scoring
from octavo.frontend.requests.prompts import ParsedPrompt, PromptType, parse_prompt
from octavo.frontend.requests.sampling_limits import SamplingLimits
from octavo.frontend.requests.sources import Sources
from octavo.frontend.requests.thinking import ReasoningStretch
from octavo.frontend.speech.model import SpeechModel
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.messages.adapters import AdapterRef, SoftPromptRef
from octavo.messages.pooling import PoolingParams
from octavo.messages.request import EngineRequest, Limits, RequestSpec, Sharing, Standing
from octavo.messages.sampling import SamplingParams
from octavo.messages.structured import Constraint

_SEED_BITS = 63
_PLAIN = {"prompt", "cache_salt"}
_SAMPLING_DEFAULTS = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")


class InputProcessor:
    """Checks and completes requests for one engine. Thread-safe."""

    def __init__(
        self, config: EngineConfig, tokenizer: Tokenizer | None, *, core_is_here: bool = False
    ) -> None:
        """core_is_here: the engine core runs in this process."""
        checkpoint, model = config.checkpoint, config.model
        self._config, self._tokenizer = config, tokenizer
        self.num_replicas = config.parallel.num_replicas
        self.limits = PromptLimits(config, tokenizer)
        self._limits = SamplingLimits.of(config, tokenizer, core_is_here=core_is_here)
        stated = {} if model.generation_config in NO_GENERATION_CONFIG else checkpoint.generation_config
        self._defaults = stated | model.override_generation_config
        self._eos_token_ids = self._find_eos(config)
        self._reasoning = ReasoningStretch.of(ChatRenderer(config, tokenizer).reasoning_parser, tokenizer)
        self.grammars = GrammarCheck(tokenizer, self._limits.vocab_size, self._eos_token_ids)
        self.adapters = AdapterFiles(config)
        self.media = PromptMedia(config, tokenizer)
        self.speech = SpeechModel.of(config, tokenizer)
        """Of a model that writes down speech."""
        self.sources = Sources(config, self.media, self.speech, self.tokenize)
        self._passes_on = passes_on(config.cache.kv_transfer_config)
        self._seeds = random.Random(model.seed) if model.seed else random.SystemRandom()
        self._pooling = PoolingInput(config, tokenizer, self.limits, self.media, self.adapters)

    def close(self) -> None:
        """End the processes that check grammars; may be called twice."""
        self.grammars.close()
        self.media.close()

    @property
    def max_model_len(self) -> int:
        """Of prompt and output; the start of the engine may lower it."""
        return self.limits.max_model_len

    def default_sampling_values(self) -> dict[str, Any]:
        """What the model recommends (generation_config.json), as fields of SamplingParams."""
        values = {
            name: self._defaults[name] for name in _SAMPLING_DEFAULTS if self._defaults.get(name) is not None
        }
        if self._defaults.get("max_new_tokens") is not None:
            values["max_tokens"] = self._defaults["max_new_tokens"]
        return values

    def get_default_sampling_params(self) -> SamplingParams:
        """New parameters with what the model recommends."""
        return SamplingParams(**self.default_sampling_values())

    def process(
        self,
        prompt: PromptType | ParsedPrompt,
        params: SamplingParams | PoolingParams | None = None,
        options: RequestOptions = NO_OPTIONS,
        *,
        request_id: str | None = None,
    ) -> PreparedRequest:
        """Check one request and make its engine requests, one for each sequence, or a beam search's first.

        request_id: made when None
        Raises RequestError, PromptTooLong, Unsupported.
        """
        options.check_rank(self.num_replicas)
        if isinstance(params, PoolingParams):
            names = [uuid4().hex if request_id is None else request_id]
            [prepared] = self._pooling.process([prompt], params, options, names)
            return prepared
        if self._config.pooling is not None:
            raise RequestError(NOT_WRITING, "model")
        standing = options.standing()
        params = params or self.get_default_sampling_params()
        check_beam_search(params)
        params = self._limits.resolve(params)
        parsed = self.sources.read(parse_prompt(prompt), options)
        ids = self._prompt_ids(parsed, options.tokenization, params)
        if self.speech is not None:
            params = self.speech.ruled(params, ids)
        soft = self.adapters.resolve_prompt(options.prompt_adapter_request)
        if soft is not None and (parsed.embeds is not None or parsed.media is not None):
            raise RequestError("prompt_embeds and images take no prompt adapter.", "prompt_embeds")
        ids, items = self.media.place(ids, parsed, options)
        parsed = replace(parsed, placed=items)
        placed = [0] * soft.num_tokens + ids if soft is not None and ids else ids
        self.limits.check(placed, options.tokenization.max_output_tokens)
        adapter = self.adapters.resolve(options.lora_request, () if parsed.embeds else placed, items)
        check_prompt_scoring(
            params, len(ids), given_as_embeds=parsed.embeds is not None, is_soft=soft is not None
        )
        prepared = PreparedRequest(
            request_id=uuid4().hex if request_id is None else request_id,
            prompt=parsed.text,
            prompt_token_ids=ids,
            params=params,
            arrival_s=standing.arrival_s,
            engine_requests=self._engine_requests(placed, params, options, standing, parsed, adapter, soft),
            lora_request=options.lora_request,
            prompt_adapter_request=options.prompt_adapter_request,
            trace_headers=options.trace_headers,
            encoder_prompt=parsed.encoder.text if parsed.encoder is not None else None,
        )
        if not params.use_beam_search:
            return prepared
        step, rules = first_step(prepared.engine_requests[0], params, self._config.model.logprobs_mode)
        return replace(prepared, engine_requests=[step], beam_rules=rules)

    def process_all(
        self,
        prompts: Sequence[PromptType],
        params: Sequence[SamplingParams | PoolingParams],
        options: Sequence[RequestOptions],
        names: Sequence[str],
    ) -> list[PreparedRequest]:
        """`process` of many prompts, with their names; of a pooling model neighbours may be one request."""
        listed = self.tokenized(list(prompts), options[0].tokenization) if prompts else []
        every = zip(listed, params, options, names, strict=True)
        if self._config.pooling is None or not all(isinstance(asked, PoolingParams) for asked in params):
            every = zip(self.media.read_all(listed, options), params, options, names, strict=True)
            return [
                self.process(given, asked, wanted, request_id=name) for given, asked, wanted, name in every
            ]
        prepared: list[PreparedRequest] = []
        most = -(-len(prompts) // self.num_replicas)
        for (asked, wanted), group in groupby(every, itemgetter(1, 2)):
            wanted.check_rank(self.num_replicas)
            given, _, _, ids = zip(*group, strict=True)
            prepared += self._pooling.process(given, asked, wanted, ids, min(most, MAX_TEXTS))
        return prepared

    def tokenize(self, text: str, options: TokenizationOptions) -> list[int]:
        """The ids of a text. Raises RequestError without a tokenizer, PromptTooLong if it cannot fit."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise RequestError(
                "A text prompt needs the tokenizer, which skip_tokenizer_init=True left out: "
                "give prompt_token_ids.",
                "prompt",
            )
        if options.truncate_prompt_tokens is None:
            self.limits.check_chars(text)
        return tokenizer.encode(text, add_special_tokens=options.add_special_tokens)

    def tokenized(
        self, prompts: list[PromptType], options: TokenizationOptions
    ) -> Sequence[PromptType | ParsedPrompt]:
        """The same prompts for `process`; several texts get their ids here, made at once on all cores."""
        read = ((i, self._plain(prompt)) for i, prompt in enumerate(prompts))
        texts = {i: parsed for i, parsed in read if parsed is not None}
        if self._tokenizer is None or len(texts) < 2:
            return prompts
        try:
            forms = [f"{parsed.instruction}{parsed.text}" for parsed in texts.values()]
            every = self._tokenizer.encode_all(forms, options.add_special_tokens)
        except RequestError:
            return prompts  # `process` will say which
        known = {
            i: ParsedPrompt(parsed.text, ids, parsed.cache_salt, instruction=parsed.instruction)
            for (i, parsed), ids in zip(texts.items(), every, strict=True)
        }
        return [known.get(i, prompt) for i, prompt in enumerate(prompts)]

    def _plain(self, prompt: PromptType) -> ParsedPrompt | None:
        """A prompt that is but a text, with a salt and, for pooling, an instruction; None of others."""
        pooling = self._config.pooling
        names = _PLAIN if pooling is None else {*_PLAIN, "instruction"}
        if not (isinstance(prompt, str) or (isinstance(prompt, Mapping) and prompt.keys() <= names)):
            return None
        parsed = parse_prompt(prompt)
        if pooling is not None:
            parsed = as_trained(parsed, pooling)
        return parsed if self.limits.may_fit(parsed.text or "") else None

    def long_ids(self, prompt: PromptType, options: TokenizationOptions) -> list[int]:
        """The tokens of a prompt that is longer than the model takes; none of others. Raises RequestError."""
        parsed = parse_prompt(prompt)
        if parsed.token_ids is None and len(f"{parsed.instruction}{parsed.text}") < self.max_model_len // 8:
            return []  # a character has not that many tokens
        ids = encode_prompt(parsed, options, self._tokenizer, self.max_model_len).ids
        return ids if len(ids) > self.max_model_len else []

    def _prompt_ids(
        self, prompt: ParsedPrompt, options: TokenizationOptions, params: SamplingParams
    ) -> list[int]:
        ids = prompt.token_ids
        if prompt.embeds is not None:
            return placeholder_ids(prompt.embeds, self._config, options)
        if ids is None:
            text = prompt.text or ""
            ids = self.tokenize(text if prompt.media is None else self.media.reader.spelled(text), options)
        keep = options.truncate_prompt_tokens
        if keep is None:
            return ids
        if keep > self.max_model_len:
            raise wrong(
                "truncate_prompt_tokens",
                f"must be at most {self.max_model_len}, the model's context, got {keep}",
            )
        if keep == -1:
            keep = max(1, self.max_model_len - (params.max_tokens or 1))
        return ids[-keep:] if options.truncation_side == "left" else ids[:keep]

    def _engine_requests(
        self,
        ids: list[int],
        params: SamplingParams,
        options: RequestOptions,
        standing: Standing,
        prompt: ParsedPrompt,
        adapter: AdapterRef | None,
        soft_prompt: SoftPromptRef | None,
    ) -> list[EngineRequest]:
        room = self.max_model_len - len(ids)
        seed = self._seeds.getrandbits(_SEED_BITS) if params.seed is None else params.seed
        base_id = uuid4().hex
        sampling, constraint = params, self._constraint(params, ids)
        if constraint is not None:
            sampling = msgspec.structs.replace(params, structured_outputs=None)  # the workers need it not
        if params.num_sequences > params.n and params.logprobs is None:
            sampling = msgspec.structs.replace(sampling, logprobs=0)  # to find the best by
        eos_token_ids = [] if params.ignore_eos else self._eos_token_ids
        spec = RequestSpec(
            task=sampling,
            seed=seed,
            stop_token_ids=sorted({*eos_token_ids, *(params.stop_token_ids or ())}),
            embeds=prompt.embeds.message if prompt.embeds else None,
            adapter=adapter,
            soft_prompt=soft_prompt,
            media=prompt.placed,
            source=prompt.source,
        )
        limits = Limits(
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            eos_token_ids=eos_token_ids,
            timeout_s=params.timeout_s,
        )
        given = options.kv_transfer_params or (params.extra_args or {}).get("kv_transfer_params") or {}
        source, target = read_transfer(given, has_connector=self._passes_on)
        leads = Sharing(
            prompt.cache_salt,
            reads_cache=not params.skip_reading_prefix_cache,
            retention=options.kept(self._config.cache),
            source=source,
            target=target,
        )
        follows = msgspec.structs.replace(leads, leader_id=f"{base_id}-0", retention=None, source=None)
        return [
            EngineRequest(
                request_id=f"{base_id}-{index}",
                prompt_token_ids=ids,
                spec=msgspec.structs.replace(spec, seed=(seed + index) % 2**_SEED_BITS),
                limits=limits,
                standing=standing,
                sharing=follows if index else leads,
                constraint=constraint,
                max_drafts=options.max_drafts,
            )
            for index in range(1 if params.use_beam_search else params.num_sequences)
        ]

    def _constraint(self, params: SamplingParams, ids: list[int]) -> Constraint | None:
        """What the output must look like; it may reason before, as far as the prompt lets it."""
        form = params.structured_outputs
        if form is None:
            return None
        constraint = self.grammars.check(form)
        if form.after_reasoning and self._reasoning is not None:
            constraint.reasoning = self._reasoning.after(ids)
        return constraint

    def _find_eos(self, config: EngineConfig) -> list[int]:
        """End-of-text ids of generation (or model) config and tokenizer, as far as the logits have them."""
        generation = config.checkpoint.generation_config | config.model.override_generation_config
        eos = generation.get("eos_token_id", config.checkpoint.text_config.get("eos_token_id"))
        given = eos if isinstance(eos, list) else [] if eos is None else [eos]
        if not all(isinstance(token_id, int) for token_id in given):
            raise BadCheckpoint(f"eos_token_id must be a token's id, or a list of ids; found {eos!r:.100}")
        ids = set(given) | (set() if self._tokenizer is None else self._tokenizer.end_ids)
        return sorted(i for i in ids if isinstance(i, int) and 0 <= i < self._limits.vocab_size)
