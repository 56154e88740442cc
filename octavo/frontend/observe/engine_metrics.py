"""`EngineMetrics`: what one engine has done, counted where requests end and steps arrive.

Fed by the output processor (per request) and by the engines (per step, verbs); read by `get_metrics` and by
the periodic line. Counting is always on: it costs some additions per output. A request with n > 1 counts as
one.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Literal

from octavo.config.engine import EngineConfig
from octavo.frontend.outputs.request_output import RequestStateStats
from octavo.messages.request import FinishReason, SchedulerStats, Text
from octavo.messages.sampling import SamplingParams
from octavo.metrics import Metric
from octavo.metrics.collection import Collection
from octavo.metrics.instruments import Counter, Gauge
from octavo.metrics.names import PREFIX

SleepState = Literal["awake", "weights_offloaded", "discard_all"]
RequestType = Literal["chat_completions", "responses", "other"]
SLEEP_STATES: tuple[SleepState, ...] = ("awake", "weights_offloaded", "discard_all")
"""By level of sleep."""
_OF_CORE = {
    "prefix_queries": "prefix_cache_queries",
    "prefix_hits": "prefix_cache_hits",
    "num_preemptions": "num_preemptions",
    "num_timeouts": "num_timeouts",
    "num_blocks_swapped_out": "num_blocks_swapped_out",
    "num_blocks_swapped_in": "num_blocks_swapped_in",
    "external_queries": "external_prefix_cache_queries",
    "external_hits": "external_prefix_cache_hits",
    "num_dropped": "num_dropped_messages",
    "num_drafts": "spec_decode_num_drafts",
    "num_draft_tokens": "spec_decode_num_draft_tokens",
    "num_accepted_tokens": "spec_decode_num_accepted_tokens",
    "num_encodings": "mm_encoder_batches",
    "num_encoded": "mm_encoder_items",
}
"""Field of SchedulerStats → counter."""
_IN_USE = ("waiting_lora_adapters", "running_lora_adapters")
_OF_ADAPTERS = ("loads", "hits", "evictions")


@dataclasses.dataclass(slots=True)
class _CoreTotal:
    """A counter of what cores count from their own start. earlier: by cores that are gone"""

    counter: Counter
    earlier: int = 0

    def take(self, total: int) -> None:
        self.counter.add(max(0, self.earlier + total - int(self.counter.value)))


class EngineMetrics:
    """The instruments of one engine, by the names of metrics/names."""

    def __init__(self, config: EngineConfig | None = None, engine: int | None = None) -> None:
        """`config` gives the labels. engine: the number of a replica; None = the first, which knows all."""
        name = config.served_names[0] if config else ""
        first = config.parallel.first_replica if config else 0
        self.labels = {"model_name": name, "engine": str(first + (engine or 0))}
        """Of all series."""
        self._config, self.num_replicas = config, config.parallel.num_replicas if config else 1
        self._replicas = [self]
        cache = dataclasses.asdict(config.cache) | {"block_size": config.tokens_per_block} if config else {}
        self._cache_labels = {name: str(value) for name, value in cache.items()}
        self._all = every = Collection(**self.labels)
        self.num_running = every.gauge("num_requests_running")
        self.num_waiting = every.gauge("num_requests_waiting")
        self._num_blocks_pinned = every.gauge("num_blocks_pinned")
        self.kv_cache_usage = every.gauge("kv_cache_usage_perc")
        self._of_core = {field: _CoreTotal(every.counter(name)) for field, name in _OF_CORE.items()}
        self._of_adapters = {name: _CoreTotal(every.counter(f"lora_{name}")) for name in _OF_ADAPTERS}
        self._adapters_info: Gauge | None = None
        self.adapters_in_use: Callable[[], tuple[list[str], list[str]]] = lambda: ([], [])
        """Names of those that waiting requests have, and running ones."""
        self._accepted: list[_CoreTotal] = []
        """Drafts that came true, by place."""
        self.prefix_queries = self._of_core["prefix_queries"].counter
        self.prefix_hits = self._of_core["prefix_hits"].counter
        self.num_drafts = self._of_core["num_drafts"].counter
        self.num_accepted_tokens = self._of_core["num_accepted_tokens"].counter
        self.prompt_tokens = every.counter("prompt_tokens")
        self.generation_tokens = every.counter("generation_tokens")
        self.request_latency = every.histogram("e2e_request_latency_seconds")
        self.engine_restarts = every.counter("engine_restarts")
        self._deadline_misses = every.counter("deadline_misses")
        self._waiting_for_room = every.gauge("num_requests_waiting_by_reason", reason="capacity")
        every.gauge("num_requests_waiting_by_reason", reason="deferred")
        self._media_queries, self._media_hits = (
            every.counter("mm_cache_queries"),
            every.counter("mm_cache_hits"),
        )
        self._media_seconds = every.histogram("mm_preprocessing_seconds")
        self._prompt_tokens_cached = every.counter("prompt_tokens_cached")
        self._first_token = every.histogram("time_to_first_token_seconds")
        self._token_gap = every.histogram("inter_token_latency_seconds")
        self._step_tokens = every.histogram("iteration_tokens_total")
        self._num_step_tokens = 0
        self.sleep_state: SleepState
        self.note_sleep_state("awake")
        if config is not None:
            every.gauge("max_num_requests_running").set(config.scheduler.max_num_seqs)
            bound = config.front.max_num_queued_reqs
            every.gauge("max_num_requests_waiting").set(math.inf if bound < 0 else bound)

            if config.lora.enable_lora and engine is None:
                labels = {"max_lora": str(config.scheduler.max_loras)}
                self._adapters_info = Gauge(PREFIX + "lora_requests_info", self.labels | labels)
            if engine is None:
                self.of(config.parallel.num_replicas - 1)

    def note_media(self, *, is_known: bool) -> None:
        """An image was looked for among the prepared ones."""
        self._media_queries.add(1)
        self._media_hits.add(int(is_known))

    def note_prepared_media(self, seconds: float) -> None:
        """An image was prepared."""
        self._media_seconds.observe(seconds)

    def note_media_tokens(self, counts: Mapping[str, int]) -> None:
        """The prompt of a request is computed, in which so many tokens stand for media, by modality."""
        for modality, count in counts.items():
            self._all.counter("mm_prompt_tokens", modality=modality).add(count)

    def of(self, engine: int) -> "EngineMetrics":
        """Return the instruments of a replica, which may be a new one."""
        while len(self._replicas) <= engine:
            self._replicas.append(EngineMetrics(self._config, len(self._replicas)))
        return self._replicas[engine]

    def total(self, name: str, field: str = "value") -> float:
        """Return the sum of one of these instruments over all replicas."""
        values: Iterator[float] = (getattr(getattr(replica, name), field) for replica in self._replicas)
        return sum(values)

    @property
    def mean_cache_usage(self) -> float:
        """Return the share of the replicas' caches that is in use."""
        return self.total("kv_cache_usage") / len(self._replicas)

    def snapshot(self) -> list[Metric]:
        """Copies of all metrics, of one replica after the other."""
        info = self._adapters_info
        if info is not None:
            names = dict(zip(_IN_USE, map(",".join, self.adapters_in_use()), strict=True))
            if not names.items() <= info.labels.items():
                info.labels, info.value = info.labels | names, time.time()
        listed = [metric for replica in self._replicas for metric in replica._all.snapshot()]
        return [*listed, info.copy()] if info is not None else listed

    def note_step(self, stats: SchedulerStats) -> None:
        """Take over the engine's state; its counters only grow."""
        self.num_running.set(stats.num_running)
        self.num_waiting.set(stats.num_waiting)
        self._waiting_for_room.set(stats.num_waiting)
        self._num_blocks_pinned.set(stats.num_blocks_pinned)
        self.kv_cache_usage.set(stats.num_blocks_used / stats.num_blocks if stats.num_blocks else 0.0)
        for field, total in self._of_core.items():
            total.take(getattr(stats, field))
        accepted = stats.num_accepted_by_position
        for position in range(len(self._accepted), len(accepted)):
            counter = self._all.counter("spec_decode_num_accepted_tokens_per_pos", position=str(position))
            self._accepted.append(_CoreTotal(counter))
        for total, count in zip(self._accepted, accepted, strict=False):
            total.take(count)
        if self._num_step_tokens:
            self._step_tokens.observe(self._num_step_tokens)
            self._num_step_tokens = 0

    def note_adapters(self, counts: Mapping[str, int]) -> None:
        """Take over what the core has counted: loads, hits, evictions."""
        for name, total in self._of_adapters.items():
            total.take(counts[name])

    def note_first_token(
        self, latency_s: float, num_prompt: int, num_cached: int, texts: Sequence[Text] = ()
    ) -> None:
        """A request's prompt is computed; latency_s: since its arrival; texts: as in `note_end`."""
        self.prompt_tokens.add(num_prompt)
        self._prompt_tokens_cached.add(num_cached)
        self._all.counter("prompt_tokens_by_source", source="local_compute").add(num_prompt - num_cached)
        self._all.counter("prompt_tokens_by_source", source="local_cache_hit").add(num_cached)
        self._all.counter("prompt_tokens_cached_by_source", source="local_cache_hit").add(num_cached)
        for num_computed in [text.num_tokens for text in texts] or [num_prompt - num_cached]:
            self._observe("request_prefill_kv_computed_tokens", num_computed)
        self._first_token.observe(latency_s, len(texts) or 1)
        self._num_step_tokens += num_prompt

    def note_tokens(self, count: int) -> None:
        """New tokens."""
        self.generation_tokens.add(count)
        self._num_step_tokens += count

    def note_gaps(self, gap_s: float, num_sequences: int) -> None:
        """So many sequences have new tokens, gap_s after their last ones."""
        self._token_gap.observe(gap_s, num_sequences)

    def note_end(
        self,
        stats: RequestStateStats,
        params: SamplingParams,
        num_prompt: int,
        reason: str,
        now: float,
        due_s: float = math.inf,
        texts: Sequence[Text] = (),
    ) -> None:
        """A request has had its last output; due_s: when that was wanted, of the clock of `now`.

        texts: of a list, each of which counts as a request
        """
        lengths = [text.num_tokens for text in texts] or [num_prompt]
        observe = partial(self._observe, count=len(lengths))
        if now > due_s or reason == FinishReason.TIMEOUT:
            self._deadline_misses.add(len(lengths))
        self._all.counter("request_success", finished_reason=reason).add(len(lengths))
        self.request_latency.observe(now - stats.arrival_time, len(lengths))
        for length in lengths:
            self._observe("request_prompt_tokens", length)
        observe("request_generation_tokens", stats.num_generation_tokens)
        observe("request_max_num_generation_tokens", stats.max_num_generation_tokens)
        observe("request_params_n", params.n)
        observe("request_num_preemptions", stats.num_preemptions)
        if params.max_tokens is not None:
            observe("request_params_max_tokens", params.max_tokens)
        if stats.first_token_ts:
            observe("request_queue_time_seconds", stats.queue_time)
            observe("request_prefill_time_seconds", stats.prefill_time)
            observe("request_decode_time_seconds", stats.decode_time)
            observe("request_inference_time_seconds", stats.inference_time)
        if stats.max_num_generation_tokens > 1:
            per_token_s = stats.decode_time / (stats.max_num_generation_tokens - 1)
            observe("request_time_per_output_token_seconds", per_token_s)

    def note_rejection(self, reason: str) -> None:
        """A request was refused because too many wait; reason: the option that bounds them."""
        self._all.counter("admission_rejections", reason=reason).add()

    def note_tool_parsing(self, request_type: RequestType, is_streamed: bool, has_calls: bool) -> None:
        """An answer was searched for calls of tools; it is streamed if it was read piece by piece."""
        self._all.counter(
            "tool_call_parser_invocations",
            mode="streaming" if is_streamed else "non_streaming",
            outcome="tool_call" if has_calls else "no_tool_call",
            request_type=request_type,
        ).add()

    def note_cache(self, num_blocks: int) -> None:
        """The engine has so many blocks."""
        for replica in self._replicas:
            info = replica._all.gauge("cache_config_info")
            info.labels = replica.labels | replica._cache_labels | {"num_gpu_blocks": str(num_blocks)}
            info.set(1)

    def note_restart(self) -> None:
        """A new core has taken over."""
        self.engine_restarts.add()
        self.note_new_core()

    def note_new_core(self) -> None:
        """What follows is told by a new core, which counts from 0."""
        for total in (*self._of_core.values(), *self._of_adapters.values(), *self._accepted):
            total.earlier = int(total.counter.value)

    def note_sleep_state(self, state: SleepState) -> None:
        """The engine sleeps, or is awake again."""
        self.sleep_state = state
        for known in SLEEP_STATES:
            for replica in self._replicas:
                replica._all.gauge("engine_sleep_state", sleep_state=known).set(float(known == state))

    def _observe(self, name: str, value: float, count: int = 1) -> None:
        self._all.histogram(name).observe(value, count)
