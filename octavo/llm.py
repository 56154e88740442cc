"""`LLM`: many prompts in, all answers out. The offline API, with vLLM's names and arguments."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from octavo.base.errors import RequestError
from octavo.config import EngineArgs
from octavo.config.model import DEFAULT_MODEL
from octavo.frontend.conversation import Message
from octavo.frontend.engine import LLMEngine
from octavo.frontend.input_processor import PreparedRequest
from octavo.frontend.outputs import RequestOutput
from octavo.frontend.progress import ProgressBar
from octavo.frontend.prompts import PromptType, TokensPrompt
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.messages.sampling import RequestOutputKind, SamplingParams

Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model, loaded in this process, that answers batches of prompts.

    >>> llm = LLM()                                      # the built-in SmolLM2-135M-Instruct
    >>> llm.generate("Once upon a time", SamplingParams(max_tokens=32))[0].outputs[0].text
    """

    def __init__(self, model: str = DEFAULT_MODEL, **options: Any) -> None:
        """Load `model`; `options` are the fields of EngineArgs. Raises ConfigError."""
        self._open(EngineArgs.from_options({"model": model, **options}))

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> Self:
        """The same from an EngineArgs."""
        llm = cls.__new__(cls)
        llm._open(args)
        return llm

    def _open(self, args: EngineArgs) -> None:
        self.llm_engine = LLMEngine.from_engine_args(args)
        self.model_config = self.llm_engine.config.model
        self.request_counter = itertools.count()

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: Params = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt; one output per prompt, in their order.

        sampling_params: one for all, one per prompt, or None for the model's defaults
        use_tqdm: show a progress bar; a callable makes it (tqdm's signature)
        priority: one per prompt, smaller first, with scheduling_policy="priority"
        All prompts are checked before any is started: RequestError then leaves the engine as it was.
        """
        listed = _as_list(prompts)
        every_params = self._params(sampling_params, len(listed))
        priorities = _per_prompt("priority", priority, len(listed), 0)
        prepared = [
            self.llm_engine.input_processor.process(
                prompt,
                params,
                request_id=str(next(self.request_counter)),
                priority=rank,
                tokenization_kwargs=tokenization_kwargs,
            )
            for prompt, params, rank in zip(listed, every_params, priorities, strict=True)
        ]
        return self._run(prepared, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: Sequence[int] | None = None,
        **chat_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several; `chat_options` as in `render_chat`."""
        batch = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [self.render_chat(conversation, **chat_options) for conversation in batch]  # type: ignore[arg-type]  # told apart above
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, priority=priority)

    def render_chat(self, messages: Sequence[Message], **chat_options: Any) -> TokensPrompt:
        """The prompt of a conversation.

        chat_options: chat_template, add_generation_prompt=True, continue_final_message=False, tools, documents,
        chat_template_kwargs
        """
        return self.llm_engine.chat.render(messages, **chat_options)

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` works without passing a template."""
        return self.llm_engine.chat.has_template

    @property
    def default_sampling_params(self) -> SamplingParams:
        """What the model recommends."""
        return self.get_default_sampling_params()

    def get_default_sampling_params(self) -> SamplingParams:
        """New SamplingParams with what the model recommends (generation_config.json)."""
        return self.llm_engine.input_processor.get_default_sampling_params()

    def get_tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None with skip_tokenizer_init."""
        return self.llm_engine.get_tokenizer()

    def get_world_size(self) -> int:
        """Number of ranks."""
        return self.llm_engine.config.parallel.tensor_parallel_size

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prompts."""
        return self.llm_engine.reset_prefix_cache()

    def collective_rpc(self, method: str, **arguments: Any) -> list[Any]:
        """Run a worker's command on every rank; one result per rank."""
        return self.llm_engine.collective_rpc(method, arguments)

    def shutdown(self) -> None:
        """Free the model and its memory; may be called twice."""
        self.llm_engine.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _params(self, params: Params, count: int) -> list[SamplingParams]:
        default = self.get_default_sampling_params() if params is None else params
        if isinstance(default, SamplingParams):
            return [_final_only(default)] * count
        return [_final_only(p) for p in _per_prompt("sampling_params", default, count, SamplingParams())]

    def _run(
        self, prepared: list[PreparedRequest], use_tqdm: bool | Callable[..., Any]
    ) -> list[RequestOutput]:
        engine = self.llm_engine
        finished: dict[str, RequestOutput] = {}
        progress = ProgressBar(use_tqdm, len(prepared))
        try:
            for request in prepared:
                engine.add_prepared(request)
            while len(finished) < len(prepared):
                for output in engine.step():
                    if output.finished:
                        finished[output.request_id] = output
                        progress.update(output)
        except BaseException:
            engine.abort_request([request.request_id for request in prepared])
            raise
        finally:
            progress.close()
        return [finished[request.request_id] for request in prepared]


def _as_list(prompts: PromptType | Sequence[PromptType]) -> list[PromptType]:
    """Tell one prompt (text, dict, token ids) from several."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]  # token ids
    return list(prompts)  # type: ignore[arg-type]  # told apart above


def _per_prompt(name: str, values: Iterable[Any] | None, count: int, default: Any) -> list[Any]:
    listed = [default] * count if values is None else list(values)
    if len(listed) != count:
        raise RequestError(
            f"The lengths of prompts ({count}) and {name} ({len(listed)}) must be the same.", name
        )
    return listed


def _final_only(params: SamplingParams) -> SamplingParams:
    """The same, without outputs that nobody would see."""
    copy = params.clone()
    copy.output_kind = RequestOutputKind.FINAL_ONLY
    return copy
