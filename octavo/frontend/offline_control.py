"""`OfflineControl`: the half of `LLM` that an operator uses; each verb is the engine's own (`control`).

The pooling methods of vLLM's class answer here too: with why there are none.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from octavo.frontend.control import PauseMode
from octavo.frontend.engine import LLMEngine
from octavo.frontend.later import refuse_pooling
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.messages.sampling import SamplingParams
from octavo.metrics import Metric


class OfflineControl:
    """Verbs of the one engine in `llm_engine`."""

    llm_engine: LLMEngine

    def get_default_sampling_params(self) -> SamplingParams:
        """New SamplingParams with what the model recommends (generation_config.json)."""
        return self.llm_engine.input_processor.get_default_sampling_params()

    def get_tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None with skip_tokenizer_init."""
        return self.llm_engine.get_tokenizer()

    def get_metrics(self) -> list[Metric]:
        """Everything counted so far, as objects with name, labels and value."""
        return self.llm_engine.get_metrics()

    def get_world_size(self, include_dp: bool = True) -> int:
        """Number of ranks; there is one replica."""
        del include_dp
        return self.llm_engine.config.parallel.tensor_parallel_size

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Run a command of the workers on every rank, or call a function with each worker of this process."""
        return self.llm_engine.collective_rpc(method, timeout, args, kwargs)

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """Call `func` with the model of each rank, if the workers are in this process; else Unsupported."""
        return self.llm_engine.apply_model(func)

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Give up memory until `wake_up`; levels and modes as in EngineControl.sleep."""
        self.llm_engine.sleep(level, mode)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take memory back: of "weights", of "kv_cache", of all that sleeps when None."""
        self.llm_engine.wake_up(tags)

    def is_sleeping(self) -> bool:
        """True while anything is given up."""
        return self.llm_engine.is_sleeping()

    def release_kv_cache_memory(self) -> None:
        """Give up the KV cache alone, until wake_up(["kv_cache"])."""
        self.llm_engine.release_kv_cache_memory()

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached prompts; what enqueued requests have computed too, if asked."""
        return self.llm_engine.reset_prefix_cache(reset_running_requests, reset_connector)

    def reset_mm_cache(self) -> None:
        """Nothing to forget: octavo serves text only."""

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Record what the device does. Raises Unsupported without the option profiler_dir."""
        self.llm_engine.start_profile(profile_prefix)

    def stop_profile(self) -> list[str]:
        """End the recording; the paths of the traces (Chrome's format), one per rank."""
        return self.llm_engine.stop_profile()

    def encode(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Of pooling models: Unsupported."""
        raise refuse_pooling("LLM.encode()")

    def embed(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Of pooling models: Unsupported."""
        raise refuse_pooling("LLM.embed()")

    def classify(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Of pooling models: Unsupported."""
        raise refuse_pooling("LLM.classify()")

    def score(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Of pooling models: Unsupported."""
        raise refuse_pooling("LLM.score()")
