"""`LLMEngine`: requests in, outputs out, one step at a time, in the caller's thread. Public.

The base of `LLM` and of scripts that drive the steps themselves; the asynchronous twin is `AsyncLLM`.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Self

from octavo.config import EngineArgs, EngineConfig, resolve
from octavo.frontend.client.inproc import InprocClient
from octavo.frontend.client.interface import EngineClient
from octavo.frontend.conversation import ChatRenderer
from octavo.frontend.input_processor import InputProcessor, PreparedRequest
from octavo.frontend.output_processor import OutputProcessor
from octavo.frontend.outputs import RequestOutput
from octavo.frontend.prompts import PromptType
from octavo.frontend.text.loader import tokenizer_for
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.messages.request import SchedulerStats
from octavo.messages.sampling import SamplingParams


class LLMEngine:
    """One engine and its front. Not thread-safe."""

    def __init__(self, config: EngineConfig, client: EngineClient | None = None) -> None:
        """Load tokenizer and model. Raises ConfigError for what the user can mend."""
        self.config = config
        self.tokenizer = tokenizer_for(config)
        self.input_processor = InputProcessor(config, self.tokenizer)
        self.chat = ChatRenderer(config, self.tokenizer)
        self.stats = SchedulerStats()
        """As of the last step."""
        self._output_processor = OutputProcessor(self.tokenizer)
        self._client = client or InprocClient(config)
        self.cache_plan = self._client.start().plan

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> Self:
        """Decide what the arguments left open, and load."""
        return cls(resolve(args))

    def add_request(
        self,
        request_id: str | None,
        prompt: PromptType,
        params: SamplingParams | None = None,
        arrival_time: float | None = None,
        *,
        priority: int = 0,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Check a request and hand it over; returns its id (made when None).

        arrival_time: monotonic seconds, now when None. Raises RequestError and what derives from it.
        """
        prepared = self.input_processor.process(
            prompt,
            params,
            request_id=request_id,
            priority=priority,
            arrival_s=arrival_time,
            tokenization_kwargs=tokenization_kwargs,
        )
        return self.add_prepared(prepared)

    def add_prepared(self, prepared: PreparedRequest) -> str:
        """Hand over a request that the input processor has made."""
        self._output_processor.add(prepared)
        for request in prepared.engine_requests:
            self._client.add(request)
        return prepared.request_id

    def step(self) -> list[RequestOutput]:
        """Run one step of the engine; what it brought, by request. Raises EngineDead."""
        outputs = self._client.step()
        self.stats = outputs.stats
        processed = self._output_processor.process(outputs)
        if processed.abort_ids:
            self._client.abort(processed.abort_ids)
        return processed.request_outputs

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests without a further output; unknown and finished ids are skipped."""
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        if abort_ids := self._output_processor.abort(ids):
            self._client.abort(abort_ids)

    def has_unfinished_requests(self) -> bool:
        """True while a request waits for its last output."""
        return self._output_processor.has_unfinished_requests()

    def get_num_unfinished_requests(self) -> int:
        """Requests that wait for their last output."""
        return self._output_processor.num_open

    def get_tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None with skip_tokenizer_init."""
        return self.tokenizer

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prompts."""
        return bool(self._client.call("reset_prefix_cache"))

    def collective_rpc(self, verb: str, arguments: dict[str, Any] | None = None) -> list[Any]:
        """Run a worker's command on every rank; one result per rank."""
        result: list[Any] = self._client.call("collective_rpc", {"verb": verb, "arguments": arguments or {}})
        return result

    def shutdown(self) -> None:
        """Free the model and its memory; may be called twice."""
        self._client.close()
