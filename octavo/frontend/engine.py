"""`LLMEngine`: requests in, outputs out, one step at a time, in the caller's thread. Public.

The base of `LLM` and of scripts that drive the steps themselves; `AsyncLLM` is the asynchronous one.
"""

from collections.abc import Iterable
from typing import Self, Unpack

from octavo.base import log
from octavo.base.errors import RequestError
from octavo.base.registry import load_object
from octavo.config import EngineArgs, EngineConfig, resolve
from octavo.config.concerns import resolve_concerns
from octavo.frontend.client.inproc import InprocClient
from octavo.frontend.client.replicated import ReplicatedClient
from octavo.frontend.observe.engine_metrics import EngineMetrics
from octavo.frontend.observe.stats_line import StatsLine
from octavo.frontend.operated import VerbsInThread, in_thread
from octavo.frontend.operator import Operator
from octavo.frontend.output_processor import OutputProcessor
from octavo.frontend.outputs.awaitable import RequestId, StepOutputs
from octavo.frontend.requests.conversation import ChatRenderer
from octavo.frontend.requests.input_processor import InputProcessor
from octavo.frontend.requests.options import RequestKeywords, RequestOptions
from octavo.frontend.requests.prepared import PreparedRequest
from octavo.frontend.requests.prompts import PromptType, joined_prompt
from octavo.frontend.stepped_core import SteppedCore
from octavo.frontend.text.loader import tokenizer_for
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.messages.control import Ready
from octavo.messages.request import SchedulerStats
from octavo.messages.sampling import SamplingParams

_PRELOAD = "octavo.runtime.preload:begin"


class LLMEngine(VerbsInThread):
    """One engine and its front. Threads may share it: each call is complete before the next one begins."""

    pause_generation = in_thread(Operator.pause_generation)
    resume_generation = in_thread(Operator.resume_generation)
    is_paused = in_thread(Operator.is_paused)
    reset_encoder_cache = in_thread(Operator.reset_encoder_cache)
    num_lora_users = in_thread(Operator.num_lora_users)
    get_supported_tasks = in_thread(Operator.get_supported_tasks)

    def __init__(self, *configs: object, client: InprocClient | None = None, **named: object) -> None:
        """Load tokenizer and model.

        configs, named: an EngineConfig; or configs by concern (octavo.config), as in
        LLMEngine(model_config, cache_config, parallel_config, scheduler_config, device_config)
        Raises ConfigError for what the user can mend.
        """
        log.setup_if_asked()
        self.config = config = resolve_concerns(*configs, **named)
        self.tokenizer = tokenizer_for(config)
        is_here = config.parallel.num_replicas == 1
        self.input_processor = InputProcessor(config, self.tokenizer, core_is_here=is_here)
        self.chat = ChatRenderer(config, self.tokenizer)
        self.metrics = EngineMetrics(config)
        self._stats_line = StatsLine(self.metrics, config.observability)
        outputs = OutputProcessor.of(config, self.tokenizer, self.metrics)
        own = InprocClient if is_here else ReplicatedClient
        self.core = SteppedCore(client or own(config), outputs)
        self.operator = Operator(config, self.metrics, self.core, self.input_processor.adapters)
        self.input_processor.media.tell(self.metrics.note_media, self.metrics.note_prepared_media)
        self.operator.forget_media = self.input_processor.media.clear
        self._learn(self.core.client.start())

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, usage_context: object = None) -> Self:
        """Decide what the arguments left open, and load.

        usage_context: accepted without effect
        """
        log.setup_if_asked()
        load_object(_PRELOAD)()
        return cls(resolve(engine_args))

    @classmethod
    def from_engine_config(cls, config: EngineConfig) -> Self:
        """The same from a config in which everything is decided."""
        return cls(config)

    @classmethod
    def from_vllm_config(cls, vllm_config: EngineConfig, usage_context: object = None) -> Self:
        """The same under vLLM's name; usage_context is accepted without effect."""
        return cls(vllm_config)

    def add_request(  # the early and the present form of vLLM's
        self,
        request_id: str | None = None,
        prompt: PromptType | None = None,
        params: SamplingParams | None = None,
        arrival_time: float | None = None,
        *,
        prompt_token_ids: list[int] | None = None,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[RequestKeywords],
    ) -> RequestId:
        """Check a request and hand it over; returns its id (made when None), which may be awaited.

        prompt_token_ids, sampling_params: other places for prompt and params
        arrival_time: monotonic seconds, now when None
        Raises RequestError and what derives from it.
        """
        prepared = self.input_processor.process(
            joined_prompt(prompt, prompt_token_ids),
            params or sampling_params,
            RequestOptions.parse(options, arrival_time),
            request_id=request_id,
        )
        return RequestId(self.add_prepared(prepared))

    def add_prepared(self, prepared: PreparedRequest) -> str:
        """Hand over a request that the input processor has made."""
        self.core.open(prepared)
        return prepared.request_id

    def step(self) -> StepOutputs:
        """Run one step of the engine; what it brought, by request. Awaited: the requests that it completed.

        Raises RequestError while the engine is paused and has nothing to report, EngineDead.
        """
        if early := self.core.take_early():
            return StepOutputs(early)
        if self.operator.is_frozen:
            raise RequestError(
                "The engine is paused or asleep: resume_generation() or wake_up() comes before the next step."
            )
        outputs = self.core.step()
        self._stats_line.log_if_due()
        return StepOutputs(outputs)

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests without a further output; unknown and finished ids are skipped."""
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        with self.core.lock:
            self.core.forget(self.core.processor.keys_of(ids))

    def has_unfinished_requests(self) -> bool:
        """True while a request waits for its last output."""
        return bool(self.core.early) or self.core.processor.has_unfinished_requests()

    def get_num_unfinished_requests(self) -> int:
        """Requests that wait for their last output."""
        return self.core.processor.num_open

    def get_tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None with skip_tokenizer_init."""
        return self.tokenizer

    @property
    def stats(self) -> SchedulerStats:
        """The state of the core as of the last step."""
        return self.core.stats

    def do_log_stats(self) -> None:
        """Log the line of statistics now."""
        self._stats_line.log()

    def shutdown(self) -> None:
        """Free the model and its memory; may be called twice."""
        self._stats_line.log_end()
        self.core.client.close()
        self.core.processor.close()
        self.input_processor.close()

    def _learn(self, ready: Ready) -> None:
        self.cache_plan = ready.plan
        self.metrics.note_cache(ready.plan.num_blocks)
        self.config = self.config.with_max_model_len(ready.max_model_len)
        self.model_config = self.config.model
        self.input_processor.limits.max_model_len = ready.max_model_len
