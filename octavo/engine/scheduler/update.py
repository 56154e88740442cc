"""`read_results`: what a step brought, entered into its requests and told to the front.

Called by the scheduler for the oldest step in flight. A request that ended since the step was given out gets
nothing from it: the result is dropped, and what it held is freed with its last step.
"""

from octavo.base.errors import RequestError
from octavo.engine.scheduler.plan import StepPlan
from octavo.engine.scheduler.request import Request, RequestStatus
from octavo.engine.scheduler.request_tracker import RequestTracker
from octavo.engine.scheduler.stops import find_stop
from octavo.engine.structured.request_matcher import RequestMatcher
from octavo.messages.request import EngineOutput, FinishReason, TokenLogprobs
from octavo.messages.step import ModelRunnerOutput


def read_results(plan: StepPlan, result: ModelRunnerOutput, tracker: RequestTracker) -> list[EngineOutput]:
    """Append sampled tokens, end the requests that are done or failed; one output for each that has news."""
    assert plan.step_id == result.step_id, f"step {plan.step_id} is due, the workers sent {result.step_id}"
    if result.prompt_logprobs:
        _keep_fresh_prompt_logprobs(plan, result)
    errors, prompt_logprobs = result.errors, result.prompt_logprobs
    brings_tokens_only = not (errors or prompt_logprobs or result.logprobs or result.routes)
    outputs = []
    for place, drafts in plan.drafts.items():
        plan.requests[place].num_unsure -= len(drafts)
    for request, token_ids in zip(plan.requests, result.sampled_token_ids, strict=True):
        request.num_in_flight -= 1
        if brings_tokens_only and len(token_ids) == 1 and request.is_routine(token_ids[0]):
            request.token_ids.append(token_ids[0])
            if request.matcher is not None:
                request.matcher.answer = None
            outputs.append(EngineOutput(request.request_id, token_ids))
        elif request.status is RequestStatus.FINISHED:
            tracker.retire(request)
        elif request.request_id in errors:
            tracker.finish(request, FinishReason.ERROR)
            outputs.append(last_output(request, errors[request.request_id]))
        elif request.request_id in result.pooled:
            outputs.append(_complete(request, result, tracker))
        elif token_ids or request.request_id in prompt_logprobs or request.request_id in result.routes:
            try:
                outputs.append(_advance(request, token_ids, result, tracker))
            except RequestError as error:
                tracker.finish(request, FinishReason.ERROR)
                outputs.append(last_output(request, str(error)))
        else:
            assert request.num_pending <= request.num_in_flight, f"no token came for {request.request_id}"
    return outputs


def tokens_to_feed(plan: StepPlan, result: ModelRunnerOutput) -> list[tuple[RequestMatcher, int]]:
    """Return the matchers that can take their next tokens together, and these."""
    return [
        (matcher, token_ids[0])
        for place, request in plan.constrained
        if (matcher := request.matcher) is not None
        and len(token_ids := result.sampled_token_ids[place]) == 1
        and request.status is not RequestStatus.FINISHED
        and not matcher.is_fed_alone
        and not (result.errors and request.request_id in result.errors)
    ]


def _advance(
    request: Request, token_ids: list[int], result: ModelRunnerOutput, tracker: RequestTracker
) -> EngineOutput:
    """Append new tokens up to the first that ends the request."""
    output = EngineOutput(request.request_id, token_ids)
    if len(request.token_ids) == request.num_given_tokens:  # the first to be sent: tell how it began
        output.scheduled_s = request.scheduled_s
        output.num_cached_tokens = request.num_cached_tokens
        named = min(request.chain.num_tokens, request.num_prompt_tokens)
        output.num_cache_creation_tokens = max(0, named - request.num_cached_tokens)
    for count, token_id in enumerate(token_ids, 1):
        request.num_computed += count > 1  # the one before was computed as a draft
        request.token_ids.append(token_id)
        stop = find_stop(request)
        if stop is not None:
            tracker.finish(request, stop.reason)
            output.new_token_ids = token_ids[:count]
            output.finish_reason, output.stop_reason, output.ended_by_text = stop
            output.num_preemptions, output.drafts = request.num_preemptions, request.drafts
            if request.sharing.target is not None:
                output.source = tracker.source_of(request)
            break
    if result.logprobs and (logprobs := result.logprobs.get(request.request_id)) is not None:
        output.logprobs = logprobs[: len(output.new_token_ids)]
    if result.prompt_logprobs:
        output.prompt_logprobs = result.prompt_logprobs.get(request.request_id)
    if result.routes:
        output.routes = result.routes.get(request.request_id)
    return output


def _complete(request: Request, result: ModelRunnerOutput, tracker: RequestTracker) -> EngineOutput:
    """End a request whose result is complete without a token, unless other texts of its list are to come."""
    if request.num_in_flight == 0 and not request.texts:
        tracker.finish(request, FinishReason.STOP)
    output = last_output(request)
    output.pooled = result.pooled[request.request_id]
    return output


def last_output(request: Request, error: str = "") -> EngineOutput:
    """Return the end of a request that brings no token."""
    return EngineOutput(
        request.request_id,
        [],
        finish_reason=request.finish_reason,
        num_cached_tokens=max(0, request.num_cached_tokens),
        error=error,
        scheduled_s=request.scheduled_s,
        num_preemptions=request.num_preemptions,
    )


def _keep_fresh_prompt_logprobs(plan: StepPlan, result: ModelRunnerOutput) -> None:
    """Leave out prompt positions that were handed out before a preemption; say nothing of those not computed.

    A chunk that starts at position c brings entries for the positions c + 1 …; the first may start behind
    what was cached.
    """
    for request, num_computed in zip(plan.requests, plan.num_computed, strict=True):
        entries: list[TokenLogprobs] | None = result.prompt_logprobs.get(request.request_id)
        if entries is not None:
            num_skipped = num_computed - request.num_prompt_logprobs
            unscored = [TokenLogprobs([], [], []) for _ in range(num_skipped)]
            fresh = unscored + entries[max(0, -num_skipped) :]
            request.num_prompt_logprobs += len(fresh)
            result.prompt_logprobs[request.request_id] = fresh
