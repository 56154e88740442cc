"""Lists of texts: for a step each text is a request of its own; of their results those of the list are made.

Called by the model runner, which forgets the texts with the step: models that are given lists keep nothing.
"""

from collections.abc import Iterator

from msgspec.structs import replace

from octavo.messages.pooling import Pooled
from octavo.messages.step import ModelRunnerOutput, NewRequest, SchedulerOutput

Names = dict[str, list[str]]
"""Of the texts of lists, by the request's id."""


def take_apart(step: SchedulerOutput) -> tuple[SchedulerOutput, Names]:
    """Return the step with texts in the place of their lists, and how they are called there."""
    names: Names = {}
    if not any(request.texts for request in step.new_requests):
        return step, names
    new_requests: list[NewRequest] = []
    counts = zip(step.num_computed_tokens, step.num_scheduled_tokens, strict=True)
    parts = dict(zip(step.request_ids, counts, strict=True))
    for request in step.new_requests:
        texts = list(_texts_of(request)) if request.texts else [request]
        new_requests += texts
        if request.texts:
            del parts[request.request_id]
            parts |= {text.request_id: (0, text.num_prompt_tokens) for text in texts}
            names[request.request_id] = [text.request_id for text in texts]
    computed, scheduled = map(list, zip(*parts.values(), strict=True))
    return replace(
        step,
        new_requests=new_requests,
        request_ids=list(parts),
        num_computed_tokens=computed,
        num_scheduled_tokens=scheduled,
    ), names


def put_together(result: ModelRunnerOutput, request_ids: list[str], names: Names) -> None:
    """Change a result to that of the step as it was, whose requests these are."""
    result.sampled_token_ids = [[] for _ in request_ids]
    for request_id, texts in names.items():
        parts = [result.pooled.pop(name) for name in texts]
        errors = {place: result.errors.pop(name) for place, name in enumerate(texts) if name in result.errors}
        data = b"".join([part.data for part in parts])
        result.pooled[request_id] = Pooled(data, [len(parts), *parts[0].shape], errors)


def _texts_of(request: NewRequest) -> Iterator[NewRequest]:
    end = 0
    for place, text in enumerate(request.texts):
        start, end, spec = end, end + text.num_tokens, request.spec
        if text.pair_start or text.num_instruction_tokens:
            wanted = {name: getattr(text, name) for name in ("pair_start", "num_instruction_tokens")}
            spec = replace(spec, **wanted)
        name = f"{request.request_id}/{place}"
        yield NewRequest(name, request.token_ids[start:end], text.num_tokens, spec)
