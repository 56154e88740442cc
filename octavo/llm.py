"""`LLM`: many prompts in, all answers out. The offline API, with vLLM's names and arguments."""

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, Unpack

from octavo.base.errors import RequestError, wrong
from octavo.base.foreign import NOT_WRITING
from octavo.config import EngineArgs, EngineConfig
from octavo.config.model import DEFAULT_MODEL
from octavo.frontend.beam_search.params import BeamSearchOutput, BeamSearchParams
from octavo.frontend.engine import LLMEngine
from octavo.frontend.observe.progress import ProgressBar
from octavo.frontend.operated import VerbsInThread
from octavo.frontend.outputs.request_output import RequestOutput
from octavo.frontend.requests.conversation import Message
from octavo.frontend.requests.long_texts import Pieces
from octavo.frontend.requests.options import (
    RequestKeywords,
    RequestOptions,
    TokenizationOptions,
    per_prompt,
    split_keywords,
)
from octavo.frontend.requests.pooling_input import outputs_of
from octavo.frontend.requests.prepared import PreparedRequest
from octavo.frontend.requests.prompts import PromptType, TokensPrompt
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.messages.adapters import LoRARequest
from octavo.messages.pooling import PoolingParams
from octavo.messages.sampling import RequestOutputKind, SamplingParams
from octavo.pooling_methods import PoolingMethods

Params = SamplingParams | Sequence[SamplingParams] | None


class LLM(VerbsInThread, PoolingMethods):
    """A model, loaded in this process, that answers batches of prompts. Threads may share it: see `generate`.

    >>> llm = LLM()                                      # the built-in SmolLM2-135M-Instruct
    >>> llm.generate("Once upon a time", SamplingParams(max_tokens=32))[0].outputs[0].text
    """

    def __init__(self, model: str = DEFAULT_MODEL, **options: Any) -> None:
        """Load `model`; `options` are the fields of EngineArgs. Raises ConfigError.

        The periodic line of statistics is off unless disable_log_stats=False; `get_metrics` works anyway.
        """
        self._open(EngineArgs.from_options({"model": model, "disable_log_stats": True, **options}))

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """The same from an EngineArgs."""
        llm = cls.__new__(cls)
        llm._open(engine_args)
        return llm

    def _open(self, args: EngineArgs) -> None:
        self.llm_engine = LLMEngine.from_engine_args(args)
        self.operator = self.llm_engine.operator
        self.engine_class = LLMEngine
        self.model_config = self.llm_engine.config.model
        self.request_counter = itertools.count()
        self._enqueued: list[str] = []
        """Ids of what `wait_for_completion` is to return."""
        self._wanted: set[str] = set()
        """Ids of requests whose last outputs are kept in `_finished` until they are returned."""
        self._finished: dict[str, RequestOutput] = {}

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: Params = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        **options: Unpack[RequestKeywords],
    ) -> list[RequestOutput]:
        """Continue each prompt; one output per prompt, in their order.

        sampling_params: one for all, one per prompt, or None for the model's defaults
        use_tqdm: show a progress bar; a callable makes it (tqdm's signature)
        options: of the requests (request_options)
        All prompts are checked before any is started: RequestError then leaves the engine as it was. Calls
        of several threads are answered in one batch. Ctrl-C ends this call's requests once the step at hand
        is done.
        """
        return self._run(self._prepare(prompts, sampling_params, options), use_tqdm)

    def enqueue(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: Params = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        **options: Unpack[RequestKeywords],
    ) -> list[str]:
        """Start requests, but compute nothing yet; their ids. `wait_for_completion` brings the outputs.

        Arguments as in `generate`; a deadline counts from now.
        """
        del use_tqdm  # adding takes no time
        prepared = self._prepare(prompts, sampling_params, options)
        ids = [request.request_id for request in prepared]
        with self.llm_engine.core.lock:
            for request in prepared:
                self.llm_engine.add_prepared(request)
            self._enqueued += ids
            self._wanted.update(ids)
        return ids

    def wait_for_completion(
        self, output_type: type[RequestOutput] | None = None, *, use_tqdm: bool | Callable[..., Any] = True
    ) -> list[RequestOutput]:
        """The outputs of everything enqueued and not yet returned, in order.

        output_type: accepted; all outputs are RequestOutputs
        """
        ids, self._enqueued = self._enqueued, []
        return self._collect(ids, use_tqdm)

    def _prepare(
        self, prompts: PromptType | Sequence[PromptType], sampling_params: Params, keywords: RequestKeywords
    ) -> list[PreparedRequest]:
        given = _as_list(prompts)
        return self._prepare_each(given, self._params(sampling_params, len(given)), keywords)

    def _prepare_each(
        self,
        given: list[PromptType],
        every_params: Sequence[SamplingParams | PoolingParams],
        keywords: RequestKeywords,
    ) -> list[PreparedRequest]:
        names = [str(next(self.request_counter)) for _ in given]
        every_options = RequestOptions.parse_each(keywords, len(given))
        return self.llm_engine.input_processor.process_all(given, every_params, every_options, names)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several; `options` as in `generate` and `render_chat`."""
        keywords, chat_options = split_keywords(options)
        return self.generate(
            self._render_all(messages, chat_options), sampling_params, use_tqdm=use_tqdm, **keywords
        )

    def enqueue_chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        **options: Any,
    ) -> list[str]:
        """`enqueue` for conversations; `options` as in `enqueue` and `render_chat`."""
        keywords, chat_options = split_keywords(options)
        return self.enqueue(
            self._render_all(messages, chat_options), sampling_params, use_tqdm=use_tqdm, **keywords
        )

    def _render_all(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]], chat_options: dict[str, Any]
    ) -> list[PromptType]:
        if self._config.pooling is not None:
            raise RequestError(NOT_WRITING, "model")
        _check_list("messages", messages, "a list of messages, or of such lists")
        batch = [messages] if messages and isinstance(messages[0], Mapping) else messages
        return [self.render_chat(conversation, **chat_options) for conversation in batch]  # type: ignore[arg-type]  # told apart above

    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: bool | Callable[..., Any] = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Return the most likely continuations of each prompt that a beam search finds, best first.

        concurrency_limit: most prompts searched at once, all when None
        Shows 2 * beam_width logprobs of each position, as far as the model's max_logprobs allow.
        """
        limit = self.model_config.max_logprobs
        num_shown = 2 * params.beam_width if limit == -1 else min(2 * params.beam_width, limit)
        if concurrency_limit is not None and concurrency_limit < 1:
            raise wrong("concurrency_limit", f"must be at least 1, got {concurrency_limit}")
        keywords: RequestKeywords = {"lora_request": lora_request}
        prepared = self._prepare(prompts, params.to_sampling_params(num_shown), keywords)
        outputs: list[RequestOutput] = []
        size = concurrency_limit or max(1, len(prepared))
        for first in range(0, len(prepared), size):
            outputs += self._run(prepared[first : first + size], use_tqdm)
        tokenizer = self.get_tokenizer()
        return [BeamSearchOutput.from_request(output, params, tokenizer) for output in outputs]

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        chat_template_content_format: str = "auto",
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        **chat_options: Any,
    ) -> TokensPrompt:
        """The prompt of a conversation.

        chat_template_content_format: string, openai, or auto, the one that the template reads
        chat_options: chat_template, add_generation_prompt=True, continue_final_message=False, tools,
        documents, chat_template_kwargs
        """
        form = chat_template_content_format
        prompt = self.llm_engine.chat.render(messages, content_format=form, **chat_options)
        return (
            TokensPrompt(**prompt, mm_processor_kwargs=mm_processor_kwargs) if mm_processor_kwargs else prompt
        )

    def get_default_sampling_params(self) -> SamplingParams:
        """New SamplingParams with what the model recommends (generation_config.json)."""
        return self.llm_engine.input_processor.get_default_sampling_params()

    def get_tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None with skip_tokenizer_init."""
        return self.llm_engine.get_tokenizer()

    def get_world_size(self, include_dp: bool = True) -> int:
        """Number of ranks; there is one replica."""
        return self.llm_engine.config.parallel.tensor_parallel_size

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` works without passing a template."""
        return self.llm_engine.chat.has_template

    @property
    def default_sampling_params(self) -> SamplingParams:
        """What the model recommends."""
        return self.get_default_sampling_params()

    def shutdown(self) -> None:
        """Free the model and its memory; may be called twice."""
        self.llm_engine.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    @property
    def _config(self) -> EngineConfig:
        return self.llm_engine.config

    def _pool(
        self, prompts: Any, params: Any, use_tqdm: bool | Callable[..., Any], keywords: Any
    ) -> list[RequestOutput]:
        given = _as_list(prompts)
        every = [params] * len(given) if isinstance(params, PoolingParams) else params
        every = per_prompt("pooling_params", every, len(given))
        if self._config.pooling is None or not self._config.pooling.enable_chunked_processing:
            return self._run(self._prepare_each(given, every, keywords), use_tqdm)
        options = TokenizationOptions.parse(keywords.get("tokenization_kwargs"))
        pieces = Pieces(self.llm_engine.input_processor, self._config.pooling, given, every, options)
        prepared = self._prepare_each(pieces.prompts, pieces.params, pieces.spread(keywords))
        return pieces.joined(self._run(prepared, use_tqdm))

    def _params(self, params: Params, count: int) -> list[SamplingParams]:
        default = self.get_default_sampling_params() if params is None else params
        if not isinstance(default, Sequence):
            return [_final_only(default)] * count
        return [_final_only(p) for p in per_prompt("sampling_params", default, count)]

    def _run(
        self, prepared: list[PreparedRequest], use_tqdm: bool | Callable[..., Any]
    ) -> list[RequestOutput]:
        ids = [request.request_id for request in prepared]
        return outputs_of(prepared, self._collect(ids, use_tqdm, prepared))

    def _collect(
        self, ids: list[str], use_tqdm: bool | Callable[..., Any], prepared: Sequence[PreparedRequest] = ()
    ) -> list[RequestOutput]:
        """Step until these requests have ended, of which `prepared` are to be started here.

        What ends meanwhile of other threads' requests, and of those enqueued, is kept for them.
        """
        engine, finished, missing = self.llm_engine, self._finished, set(ids)
        counts = {request.request_id: len(request.text_ids) or 1 for request in prepared}
        progress = ProgressBar(use_tqdm, sum(counts.values()) or len(ids))
        try:
            progress.begin()
            with engine.core.lock:
                self._wanted |= missing
                for request in prepared:
                    engine.add_prepared(request)
            while missing:
                with engine.core.lock:  # taken for each step it would cost 1 % of a short one
                    while missing.isdisjoint(finished):
                        self._step()
                        if engine.core.lock.is_wanted or progress.is_due:
                            break
                    came = missing.intersection(finished)
                    missing -= came
                    num_open = engine.core.processor.num_tokens(missing) if progress.is_due else 0
                for request_id in came:
                    progress.update(finished[request_id], counts.get(request_id, 1))
                if num_open:
                    progress.advance(num_open)
        except BaseException:
            engine.abort_request(missing)
            for request_id in ids:
                finished.pop(request_id, None)
            raise
        finally:
            progress.close()
            self._wanted.difference_update(ids)
        return [finished.pop(request_id) for request_id in ids]

    def _step(self) -> None:
        """Run one step for everybody, and keep the last outputs that somebody will ask for."""
        for output in self.llm_engine.step():
            if output.finished and output.request_id in self._wanted:
                self._finished[output.request_id] = output


def _as_list(prompts: PromptType | Sequence[PromptType]) -> list[PromptType]:
    """Tell one prompt (text, dict, token ids) from several."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    _check_list("prompts", prompts, "a text, token ids, a dict, or a list of these")
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]  # token ids
    return list(prompts)  # type: ignore[arg-type]  # told apart above


def _check_list(name: str, given: object, wanted: str) -> None:
    if not isinstance(given, Sequence) or isinstance(given, str | bytes | bytearray):
        raise wrong(name, f"must be {wanted}, got {type(given).__name__}")


def _final_only(params: SamplingParams) -> SamplingParams:
    """The same, without outputs that nobody would see; not checked here."""
    if not isinstance(params, SamplingParams):
        raise wrong(
            "sampling_params", f"must be SamplingParams or a list of them, got {type(params).__name__}"
        )
    final = copy.copy(params)
    final.output_kind = RequestOutputKind.FINAL_ONLY
    return final
