"""Counting what a request used, for `usage` and `metrics`; common to completions and chat."""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from msgspec import UNSET, UnsetType

from octavo.config.server import ServerConfig
from octavo.frontend.outputs.request_output import CompletionOutput, RequestOutput, RequestSpecDecodeMetrics
from octavo.serving.openai.answers import CompletionTokensDetails, PromptTokensDetails, RequestMetrics, Usage
from octavo.serving.openai.protocol import SamplingFields


class CacheUse(NamedTuple):
    """Tokens of prompts."""

    num_read: int = 0
    """Found in the prefix cache."""
    num_created: int = 0
    """Left there for others."""


NOTHING_CACHED = CacheUse()


class Meter:
    """Tokens of one HTTP request, counted as outputs come, whole ones or deltas."""

    def __init__(self, request: SamplingFields, config: ServerConfig) -> None:
        options = request.stream_options
        is_forced = config.enable_force_include_usage
        self.shows_end = bool(options and options.include_usage) or is_forced
        """Whether the stream ends with usage."""
        self.shows_always = is_forced or bool(self.shows_end and options and options.continuous_usage_stats)
        self._details = config.enable_prompt_tokens_details
        self._metrics = config.enable_per_request_metrics
        self._num_prompt: dict[int, int] = {}
        self._cache: dict[int, CacheUse] = {}
        self._media: dict[int, Mapping[str, int]] = {}
        self._num_output = 0
        self.num_reasoning = 0
        """Of the tokens of output; `Turn` counts them."""
        self._last: RequestOutput | None = None

    def count(self, index: int, output: RequestOutput, num_output: int | None = None) -> None:
        """An output of prompt `index`; num_output: of its tokens, when not all are shown."""
        self._num_prompt[index] = len(output.prompt_token_ids or ())
        self._media[index] = output.num_media_tokens
        self._cache[index] = CacheUse(output.num_cached_tokens or 0, output.num_cache_creation_tokens or 0)
        if num_output is None:
            num_output = sum(len(completion.token_ids) for completion in output.outputs)
        self._num_output += num_output
        self._last = output

    def usage(self) -> Usage:
        """All so far."""
        num_prompt = sum(self._num_prompt.values())
        thoughts = CompletionTokensDetails(self.num_reasoning) if self.num_reasoning else None
        return Usage(num_prompt, self._num_output, num_prompt + self._num_output, self._of_prompt(), thoughts)

    def _of_prompt(self) -> PromptTokensDetails | None:
        """What the prompts are made of, if some have images, or the option asks for it."""
        media = Counter[str]()
        for counts in self._media.values():
            media.update(counts)
        if not (media or self._details):
            return None
        parts = {f"{modality}_tokens": count for modality, count in media.items()}
        return PromptTokensDetails(sum(use.num_read for use in self._cache.values()), **parts)

    def cache_use(self) -> CacheUse:
        """Of all prompts, with the option enable_prompt_tokens_details."""
        if not self._details:
            return NOTHING_CACHED
        return CacheUse(*map(sum, zip(*self._cache.values(), strict=True)))

    def of_chunk(self, num_untold: int = 0) -> Usage | UnsetType | None:
        """What a chunk with choices says: all so far, or null before a last chunk that says it.

        num_untold: tokens that were counted and come with the next chunk
        """
        if self.shows_always:
            usage = self.usage()
            usage.completion_tokens -= num_untold
            usage.total_tokens -= num_untold
            return usage
        return None if self.shows_end else UNSET

    def drafts(self, completion: CompletionOutput) -> RequestSpecDecodeMetrics | UnsetType:
        """What was guessed of a sequence that has ended, with the option enable_per_request_metrics."""
        return (completion.spec_decode_metrics if self._metrics else None) or UNSET

    def metrics(self) -> RequestMetrics | UnsetType:
        """Latencies, with the option enable_per_request_metrics."""
        stats = self._last.metrics if self._last and self._metrics else None
        if stats is None:
            return UNSET
        num_gaps = stats.max_num_generation_tokens - 1
        busy_s = stats.inference_time
        return RequestMetrics(
            time_to_first_token_ms=1e3 * stats.first_token_latency,
            generation_time_ms=1e3 * stats.decode_time,
            queue_time_ms=1e3 * stats.queue_time,
            mean_itl_ms=1e3 * stats.decode_time / num_gaps if num_gaps > 0 else UNSET,
            tokens_per_second=stats.num_generation_tokens / busy_s if busy_s else 0.0,
        )
