"""`LLMEngine`: requests in, outputs out, one step at a time, in the caller's thread. Public.

The base of `LLM` and of scripts that drive the steps themselves; the asynchronous twin is `AsyncLLM`.
"""

from collections.abc import Iterable
from typing import Any, Self, Unpack

from octavo.base import log
from octavo.base.errors import RequestError
from octavo.base.registry import load_object
from octavo.config import EngineArgs, EngineConfig, resolve
from octavo.config.concerns import resolve_concerns
from octavo.frontend.awaitable import RequestId, StepOutputs
from octavo.frontend.client.inproc import InprocClient
from octavo.frontend.client.interface import EngineClient
from octavo.frontend.control import EngineControl, PauseMode
from octavo.frontend.conversation import ChatRenderer
from octavo.frontend.engine_metrics import EngineMetrics
from octavo.frontend.input_processor import InputProcessor, PreparedRequest
from octavo.frontend.output_processor import OutputProcessor
from octavo.frontend.outputs import RequestOutput
from octavo.frontend.prompts import PromptType, joined_prompt
from octavo.frontend.request_options import RequestKeywords, RequestOptions
from octavo.frontend.stats_line import StatsLine
from octavo.frontend.text.loader import tokenizer_for
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.messages.control import Ready
from octavo.messages.request import EngineOutputs, FinishReason, SchedulerStats
from octavo.messages.sampling import SamplingParams

_PRELOAD = "octavo.runtime.preload:begin"


class LLMEngine(EngineControl):
    """One engine and its front. Not thread-safe."""

    def __init__(self, *configs: object, client: EngineClient | None = None, **named: object) -> None:
        """Load tokenizer and model.

        configs, named: an EngineConfig; or configs by concern (octavo.config), as in
        LLMEngine(model_config, cache_config, parallel_config, scheduler_config, device_config)
        Raises ConfigError for what the user can mend.
        """
        log.setup_if_asked()
        self.config = config = resolve_concerns(*configs, **named)
        self.tokenizer = tokenizer_for(config)
        self.input_processor = InputProcessor(config, self.tokenizer, core_is_here=True)
        self.chat = ChatRenderer(config, self.tokenizer)
        self.stats = SchedulerStats()
        """As of the last step."""
        self.metrics = EngineMetrics(config)
        self._stats_line = StatsLine(self.metrics, config.observability)
        self._output_processor = OutputProcessor.of(config, self.tokenizer, self.metrics)
        self._early: list[RequestOutput] = []
        """Outputs that came while the engine was being paused: the next step's."""
        self._client = client or InprocClient(config)
        self._learn(self._client.start())

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, usage_context: object = None) -> Self:
        """Decide what the arguments left open, and load.

        usage_context: accepted without effect
        """
        del usage_context
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
        del usage_context
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
        self._output_processor.add(prepared)
        for request in prepared.engine_requests:
            self._client.add(request)
        return prepared.request_id

    def step(self) -> StepOutputs:
        """Run one step of the engine; what it brought, by request. Awaited: the requests that it completed.

        Raises RequestError while the engine is paused and has nothing to report, EngineDead.
        """
        if self._early:
            outputs, self._early = self._early, []
            return StepOutputs(outputs)
        if self._is_frozen:
            raise RequestError(
                "The engine is paused or asleep: resume_generation() or wake_up() comes before the next step."
            )
        outputs = self._take(self._client.step())
        self._stats_line.log_if_due()
        return StepOutputs(outputs)

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests without a further output; unknown and finished ids are skipped."""
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        if abort_ids := self._output_processor.forget(self._output_processor.keys_of(ids)):
            self._client.abort(abort_ids)

    def has_unfinished_requests(self) -> bool:
        """True while a request waits for its last output."""
        return bool(self._early) or self._output_processor.has_unfinished_requests()

    def get_num_unfinished_requests(self) -> int:
        """Requests that wait for their last output."""
        return self._output_processor.num_open

    def get_tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None with skip_tokenizer_init."""
        return self.tokenizer

    def do_log_stats(self) -> None:
        """Log the line of statistics now."""
        self._stats_line.log()

    def shutdown(self) -> None:
        """Free the model and its memory; may be called twice."""
        self._stats_line.log_end()
        self._client.close()
        self._output_processor.close()
        self.input_processor.close()

    def _learn(self, ready: Ready) -> None:
        """Take over what the core decided at its start."""
        self.cache_plan = ready.plan
        self.config = self.config.with_max_model_len(ready.max_model_len)
        self.model_config = self.config.model
        self.input_processor.max_model_len = ready.max_model_len

    def _take(self, outputs: EngineOutputs) -> list[RequestOutput]:
        """What a step brought, for users; and what follows from it for the core."""
        self.stats = outputs.stats
        processed = self._output_processor.process(outputs)
        if processed.abort_ids:
            self._client.abort(processed.abort_ids)
        for request in processed.new_requests:
            self._client.add(request)
        return processed.request_outputs

    def _call(self, verb: str, arguments: dict[str, Any] | None = None) -> Any:
        return self._client.call(verb, arguments)

    def _settle(self, mode: PauseMode) -> None:
        processor = self._output_processor
        if mode == "abort":
            processed = processor.end(processor.open_keys(), FinishReason.ABORT)
            self._client.abort(processed.abort_ids)
            self._early += processed.request_outputs
        while mode == "wait" and not self._is_frozen and processor.has_unfinished_requests():
            self._early += self._take(self._client.step())
