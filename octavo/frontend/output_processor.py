"""`OutputProcessor`: what the core brings, as `RequestOutput`s; owner of every open request of the front.

Called by the offline and the asynchronous engine, from one thread. Says which requests the core must abort
(stop strings are found here: the core knows only ids) and what it must compute next (beams). Each accepted
request gets exactly one last output; what the core still brings for an ended one is dropped. An error in
handling one request ends that request only.
"""

import logging
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Self

from octavo.base.errors import RequestError
from octavo.base.log import get_logger
from octavo.config.engine import EngineConfig
from octavo.frontend.observe.engine_metrics import EngineMetrics
from octavo.frontend.observe.otel import RequestTracer, tracer_for
from octavo.frontend.observe.request_trace import RequestTrace, trace_for
from octavo.frontend.outputs.request_output import RequestOutput
from octavo.frontend.requests import open_request
from octavo.frontend.requests.beam_search_request import BeamSearchRequest
from octavo.frontend.requests.prepared import PreparedRequest
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.messages.pooling import PoolingParams
from octavo.messages.request import EngineOutput, EngineOutputs, EngineRequest, FinishReason

logger = get_logger(__name__)
_INTERNAL = "Internal error while handling the output of this request."


class Processed(NamedTuple):
    """Outputs for users, the core's ids of requests that it must abort, and its next requests."""

    request_outputs: list[RequestOutput]
    abort_ids: list[str]
    new_requests: list[EngineRequest]


class OutputProcessor:
    """Holds the open requests; not thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        metrics: EngineMetrics | None = None,
        *,
        strict_ids: bool = False,
        log_requests: bool = False,
        tracer: RequestTracer | None = None,
        trace: RequestTrace | None = None,
    ) -> None:
        """strict_ids: refuse a client's id that is in use, instead of keeping both requests apart."""
        self._tokenizer = tokenizer
        self._every_metrics = self._metrics = metrics or EngineMetrics()
        """Of all replicas; of the one whose outputs came last."""
        self._every_metrics.adapters_in_use = self._adapters_in_use
        self._strict_ids = strict_ids
        self._log_level = logging.INFO if log_requests else logging.DEBUG
        self._tracer, self._trace = tracer, trace
        self._open: dict[str, open_request.OpenRequest] = {}
        self._keys: dict[str, list[str]] = {}
        """By the client's id."""
        self._owners: dict[str, _Ownership] = {}
        """By the core's ids."""

    @classmethod
    def of(cls, config: EngineConfig, tokenizer: Tokenizer | None, metrics: EngineMetrics) -> Self:
        """The processor of an engine with these options."""
        return cls(
            tokenizer,
            metrics,
            strict_ids=config.front.strict_request_ids,
            log_requests=config.observability.enable_log_requests,
            tracer=tracer_for(config),
            trace=trace_for(config),
        )

    def close(self) -> None:
        """Nothing more comes: send the last spans, if there are any; takes two seconds at most."""
        if self._tracer is not None:
            self._tracer.close()
            self._tracer = None
        if self._trace is not None:
            self._trace.close()

    @property
    def num_open(self) -> int:
        """Requests without their last output."""
        return len(self._open)

    def has_unfinished_requests(self) -> bool:
        """True while any request is open."""
        return bool(self._open)

    def open_keys(self) -> list[str]:
        """The keys of all open requests, in order of arrival."""
        return list(self._open)

    def keys_of(self, request_ids: Iterable[str], tenant: str | None = None) -> list[str]:
        """The keys of the open requests that their clients call so; unknown ids are skipped.

        tenant: only his
        """
        keys = [key for request_id in request_ids for key in self._keys.get(request_id, ())]
        return keys if tenant is None else [key for key in keys if self._open[key].tenant == tenant]

    def _adapters_in_use(self) -> tuple[list[str], list[str]]:
        """Return the names of adapters that open requests have: of those that wait, and of those that run."""
        names: tuple[set[str], set[str]] = set(), set()
        for request in self._open.values():
            if (adapter := request.adapter_name) is not None:
                names[bool(request.stats.first_token_ts)].add(adapter)
        return sorted(names[0]), sorted(names[1])

    def num_tokens(self, request_ids: Iterable[str]) -> int:
        """How many tokens of these requests have come."""
        return sum(self._open[key].stats.num_generation_tokens for key in self.keys_of(request_ids))

    def open_requests(self) -> list[open_request.OpenRequest]:
        """All open requests, in order of arrival."""
        return list(self._open.values())

    def engine_ids(self) -> list[str]:
        """The core's ids of what it still has to do, in the order in which it was asked."""
        return list(self._owners)

    def owners_of(self, engine_ids: Iterable[str]) -> dict[open_request.OpenRequest, list[str]]:
        """The open requests that own these of the core, with their ids; unknown ids are skipped."""
        owners: dict[open_request.OpenRequest, list[str]] = {}
        for engine_id in engine_ids:
            if engine_id in self._owners:
                owners.setdefault(self._owners[engine_id].request, []).append(engine_id)
        return owners

    def resume(self, engine_ids: Iterable[str]) -> list[EngineRequest]:
        """What another core must be told to go on with these of the last one; unknown ids are skipped."""
        owners = [self._owners[engine_id] for engine_id in engine_ids if engine_id in self._owners]
        return [owner.request.resume(owner.asked) for owner in owners]

    def add(self, prepared: PreparedRequest, receiver: open_request.Receiver | None = None) -> None:
        """Open a request, before it is sent to the core; `receiver` gets its outputs.

        Raises RequestError when strict and its id is open already.
        """
        if self._strict_ids and prepared.request_id in self._keys:
            raise RequestError(
                f"Request id {prepared.request_id!r} is in use by an open request.", "request_id"
            )
        kind: type[open_request.OpenRequest] = open_request.SampledRequest
        if prepared.beam_rules is not None:
            kind = BeamSearchRequest
        elif isinstance(prepared.engine_requests[0].spec.task, PoolingParams) or (
            prepared.params.returns_alignment
        ):
            kind = open_request.PooledRequest
        request = self._open[prepared.key] = kind(prepared, self._tokenizer)
        request.receiver = receiver
        self._keys.setdefault(prepared.request_id, []).append(prepared.key)
        self._own(request, prepared.engine_requests)
        logger.log(
            self._log_level, "Request %s: %d prompt tokens", request.request_id, request.num_prompt_tokens
        )

    def process(self, outputs: EngineOutputs) -> Processed:
        """Take in what one step brought."""
        self._metrics = self._every_metrics.of(outputs.engine)
        now = time.monotonic()
        touched: dict[open_request.OpenRequest, None] = {}
        gaps: Counter[float] = Counter()
        processed = Processed([], [], [])
        for output in outputs.outputs:
            owner = self._owners.get(output.request_id)
            if owner is None:
                continue  # it has ended here; the core had it in flight
            request = owner.request
            touched[request] = None
            if output.new_token_ids or output.pooled:
                self._count(owner, output, now, gaps)
            try:
                orders = request.feed(output, now)
            except Exception:
                logger.exception("Request %s: its output could not be handled", request.request_id)
                orders = request.fail(output, _INTERNAL)
            if output.finish_reason is not None:
                del self._owners[output.request_id]
            if orders is not open_request.NO_ORDERS:
                self._disown(orders.abort_ids)
                self._own(request, orders.new_requests)
                processed.abort_ids.extend(orders.abort_ids)
                processed.new_requests.extend(orders.new_requests)
        for request in touched:
            self._deliver(request, now, processed)
        for last_s, num_sequences in gaps.items():
            self._metrics.note_gaps(now - last_s, num_sequences)
        self._metrics.note_step(outputs.stats)
        return processed

    def end(self, keys: Iterable[str], reason: FinishReason, error: str = "") -> Processed:
        """End requests from the front: abort, timeout, error. Unknown and ended ones are skipped."""
        now = time.monotonic()
        processed = Processed([], [], [])
        for key in keys:
            request = self._open.get(key)
            if request is not None:
                processed.abort_ids.extend(request.end(reason, error))
                self._deliver(request, now, processed)
        self._disown(processed.abort_ids)
        return processed

    def forget(self, keys: Iterable[str], reason: FinishReason = FinishReason.ABORT) -> list[str]:
        """End requests whose readers are gone; the core's ids to abort. Idempotent."""
        for key in keys:
            if (request := self._open.get(key)) is not None:
                request.receiver = _nobody
        return self.end(keys, reason).abort_ids

    def owner_of(self, engine_id: str) -> str | None:
        """The key of the open request that the core knows as `engine_id`."""
        owner = self._owners.get(engine_id)
        return None if owner is None else owner.request.key

    def _deliver(self, request: open_request.OpenRequest, now: float, processed: Processed) -> None:
        """Hand out what is new of `request`, and close it if that was its last output."""
        try:
            made, is_over = request.make_output(), request.finished
        except Exception:
            logger.exception("Request %s: its output could not be made", request.request_id)
            made, is_over = request.break_off(_INTERNAL), True
            ids = [engine_id for engine_id, owner in self._owners.items() if owner.request is request]
            self._disown(ids)
            processed.abort_ids.extend(ids)
        if made is None:
            return
        if is_over:
            self._note_end(request, made, now)
        if request.receiver is not None:
            request.receiver(made)
        else:
            processed.request_outputs.append(made)

    def _note_end(self, request: open_request.OpenRequest, made: RequestOutput, now: float) -> None:
        """Count, log and close a request; `made` is its last output."""
        reasons = (completion.finish_reason for completion in made.outputs if completion.finish_reason)
        reason = next(reasons, FinishReason.ABORT.value)
        self._metrics.note_end(
            request.stats,
            request.params,
            request.num_prompt_tokens,
            reason,
            now,
            request.due_s,
            request.asked.texts,
        )
        if self._tracer is not None:
            self._tracer.note_end(request, reason, now)
        if self._trace is not None:
            self._trace.note_end(request, now)
        self._close(request)
        logger.log(
            self._log_level,
            "Request %s ended: %s, %d tokens",
            request.request_id,
            reason,
            request.stats.num_generation_tokens,
        )

    def _close(self, request: open_request.OpenRequest) -> None:
        del self._open[request.key]
        keys = self._keys[request.request_id]
        keys.remove(request.key)
        if not keys:
            del self._keys[request.request_id]

    def _count(self, owner: "_Ownership", output: EngineOutput, now: float, gaps: Counter[float]) -> None:
        """gaps: how many sequences had their last tokens when; most of a step had them together."""
        if owner.last_token_s:
            gaps[owner.last_token_s] += 1
        elif not owner.request.stats.first_token_ts:
            waited_s = now - owner.request.stats.arrival_time
            self._metrics.note_first_token(
                waited_s, owner.request.num_prompt_tokens, owner.request.num_cached(output), owner.asked.texts
            )
            self._metrics.note_media_tokens(owner.request.num_media_tokens)
        owner.last_token_s = now
        self._metrics.note_tokens(len(output.new_token_ids))

    def _own(self, request: open_request.OpenRequest, engine_requests: Iterable[EngineRequest]) -> None:
        self._owners.update((entry.request_id, _Ownership(request, entry)) for entry in engine_requests)

    def _disown(self, engine_ids: Iterable[str]) -> None:
        for engine_id in engine_ids:
            self._owners.pop(engine_id, None)


@dataclass(slots=True)
class _Ownership:
    """One of the core's requests, seen from here."""

    request: open_request.OpenRequest
    asked: EngineRequest
    last_token_s: float = 0.0


def _nobody(output: RequestOutput) -> None:
    """Receives what no one reads."""
