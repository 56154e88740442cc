"""When a request ends by its own tokens: end of text, stop tokens, a matcher's end, limits, repetition.

Asked by `update` once for every token. Stop strings are the front's business (it has the text); it aborts the
request here.
"""

from collections.abc import Sequence
from typing import NamedTuple

from octavo.base.errors import RequestError
from octavo.engine.scheduler.request import Request
from octavo.messages.request import FinishReason


class Stop(NamedTuple):
    """Why a request ended, and what it was that ended it (None for end of text and limits)."""

    reason: FinishReason
    cause: int | str | None = None
    by_text: bool = False
    """The token that ended it is part of the text."""


def find_stop(request: Request) -> Stop | None:
    """Return why the request ends with its last token, if so; `min_tokens` holds back tokens, never limits.

    Nor does it hold back a matcher that has come to its end. Raises RequestError for a token that the matcher
    cannot follow.
    """
    last = request.token_ids[-1]
    is_complete = request.matcher is not None and request.matcher.feed(last)
    repeats = request.repetition is not None and request.repetition.feed(last)
    if last in request.stop_token_ids and _is_long_enough(request):
        return Stop(FinishReason.STOP, None if last in request.limits.eos_token_ids else last)
    if is_complete:
        return Stop(FinishReason.STOP, by_text=True)
    if len(request.token_ids) >= request.max_total_tokens:
        return Stop(FinishReason.LENGTH)
    if repeats and _is_long_enough(request):
        return Stop(FinishReason.REPETITION, "repetition_detected")
    return None


def take_given_outputs(request: Request, token_ids: Sequence[int]) -> None:
    """Append outputs that the request had before it came here. Raises RequestError if they complete it."""
    for token_id in token_ids:
        request.token_ids.append(token_id)
        if find_stop(request) is not None:
            raise RequestError(
                "The output is complete: nothing follows given_output_ids.", "given_output_ids"
            )


def _is_long_enough(request: Request) -> bool:
    return request.num_output_tokens >= request.spec.sampling.min_tokens
