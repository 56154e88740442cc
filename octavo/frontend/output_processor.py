"""`OutputProcessor`: what the core brings, as `RequestOutput`s; owner of every open request of the front.

Called by the offline and the asynchronous engine, from one thread. Finds stop strings (the core knows only
ids) and says which requests the core must therefore abort. Each accepted request gets exactly one last
output; what the core still brings for an ended one is dropped. An error in handling one request ends that
request only.
"""

import time
from collections.abc import Iterable
from typing import NamedTuple

from octavo.base.errors import RequestError
from octavo.base.log import get_logger
from octavo.frontend.input_processor import PreparedRequest
from octavo.frontend.outputs import CompletionOutput, PromptLogprobs, RequestOutput, RequestStateStats
from octavo.frontend.sequence_output import SequenceOutput, position_logprobs
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.messages.request import EngineOutput, EngineOutputs, FinishReason
from octavo.messages.sampling import RequestOutputKind

logger = get_logger(__name__)


class Processed(NamedTuple):
    """Outputs for users, and the core's ids of requests that it must abort."""

    request_outputs: list[RequestOutput]
    abort_ids: list[str]


class OutputProcessor:
    """Holds the open requests; not thread-safe."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._open: dict[str, _OpenRequest] = {}
        self._owners: dict[str, tuple[_OpenRequest, SequenceOutput]] = {}

    @property
    def num_open(self) -> int:
        """Requests without their last output."""
        return len(self._open)

    def has_unfinished_requests(self) -> bool:
        """True while any request is open."""
        return bool(self._open)

    def open_ids(self) -> list[str]:
        """The clients' ids of all open requests."""
        return list(self._open)

    def add(self, prepared: PreparedRequest) -> None:
        """Open a request, before it is sent to the core. Raises RequestError when its id is open already."""
        if prepared.request_id in self._open:
            raise RequestError(
                f"Request id {prepared.request_id!r} is in use by an open request.", "request_id"
            )
        request = _OpenRequest(prepared, self._tokenizer)
        self._open[prepared.request_id] = request
        for engine_request, sequence in zip(prepared.engine_requests, request.sequences, strict=True):
            self._owners[engine_request.request_id] = (request, sequence)

    def process(self, outputs: EngineOutputs) -> Processed:
        """Take in what one step brought."""
        now = time.monotonic()
        touched: dict[str, _OpenRequest] = {}
        abort_ids: list[str] = []
        for output in outputs.outputs:
            owner = self._owners.get(output.request_id)
            if owner is None:
                continue  # it has ended here; the core had it in flight
            request, sequence = owner
            touched[request.request_id] = request
            try:
                drop = request.feed(sequence, output, now)
            except Exception:
                logger.exception("Request %s: its output could not be handled", request.request_id)
                drop = output.finish_reason is None
                sequence.fail("Internal error while handling the output of this request.")
            if drop:
                abort_ids.append(output.request_id)
            if sequence.finish_reason is not None:
                del self._owners[output.request_id]
        made = [request.make_output() for request in touched.values()]
        for request in touched.values():
            if request.finished:
                del self._open[request.request_id]
        return Processed([output for output in made if output is not None], abort_ids)

    def end(self, request_ids: Iterable[str], reason: FinishReason, error: str = "") -> Processed:
        """End requests from the front: abort, timeout, error. Unknown and ended ids are skipped."""
        outputs: list[RequestOutput] = []
        abort_ids: list[str] = []
        for request_id in request_ids:
            request = self._open.pop(request_id, None)
            if request is None:
                continue
            for engine_id, sequence in zip(request.engine_ids, request.sequences, strict=True):
                if self._owners.pop(engine_id, None) is not None:
                    abort_ids.append(engine_id)
                    sequence.end(reason, error=error)
            last = request.make_output()
            assert last is not None  # an open request has news once it is ended
            outputs.append(last)
        return Processed(outputs, abort_ids)

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """Forget requests whose client is gone; the core's ids to abort. Idempotent."""
        return self.end(request_ids, FinishReason.ABORT).abort_ids


class _OpenRequest:
    """One client's request with its sequences."""

    def __init__(self, prepared: PreparedRequest, tokenizer: Tokenizer | None) -> None:
        self.request_id = prepared.request_id
        self.engine_ids = [request.request_id for request in prepared.engine_requests]
        self._prepared = prepared
        self._tokenizer = tokenizer
        params, ids = prepared.params, prepared.prompt_token_ids
        self.sequences = [SequenceOutput(i, params, ids, tokenizer) for i in range(len(self.engine_ids))]
        self._stats = RequestStateStats(arrival_time=prepared.arrival_s, queued_ts=time.monotonic())
        self._num_cached_tokens: int | None = None
        self._prompt_logprobs: PromptLogprobs | None = None if params.prompt_logprobs is None else [None]
        self._prompt_logprobs_shown = False

    @property
    def finished(self) -> bool:
        """True when every sequence has ended."""
        return all(sequence.finish_reason is not None for sequence in self.sequences)

    def feed(self, sequence: SequenceOutput, output: EngineOutput, now: float) -> bool:
        """Hand a step's output to its sequence; True when the core must drop it."""
        if output.new_token_ids:
            stats = self._stats
            stats.num_generation_tokens += len(output.new_token_ids)
            stats.first_token_ts = stats.first_token_ts or now
            stats.last_token_ts = now
        if sequence.index == 0:
            self._take_prompt_facts(output)
        return sequence.feed(output)

    def make_output(self) -> RequestOutput | None:
        """What the user is to see now, in the kind asked for; None when there is nothing new."""
        finished, kind = self.finished, self._prepared.params.output_kind
        news = [sequence for sequence in self.sequences if sequence.has_news]
        if not news or (kind is RequestOutputKind.FINAL_ONLY and not finished):
            return None
        delta = kind is RequestOutputKind.DELTA
        shown = [sequence.take(delta=delta) for sequence in (news if delta else self.sequences)]
        return self._wrap(shown, finished=finished, once=delta)

    def _wrap(self, completions: list[CompletionOutput], *, finished: bool, once: bool) -> RequestOutput:
        prompt_logprobs = None if once and self._prompt_logprobs_shown else self._prompt_logprobs
        self._prompt_logprobs_shown = True
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prepared.prompt,
            prompt_token_ids=self._prepared.prompt_token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=completions,
            finished=finished,
            metrics=self._stats,
            num_cached_tokens=self._num_cached_tokens,
        )

    def _take_prompt_facts(self, output: EngineOutput) -> None:
        if self._num_cached_tokens is None:
            self._num_cached_tokens = output.num_cached_tokens
        if self._prompt_logprobs is not None and output.prompt_logprobs:
            entries = output.prompt_logprobs
            self._prompt_logprobs.extend(position_logprobs(entry, self._tokenizer) for entry in entries)
