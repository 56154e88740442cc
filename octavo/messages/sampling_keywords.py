"""Keywords of `SamplingParams` that octavo knows and does not serve: refused with a reason, not as unknown.

The values that ask for nothing are accepted and dropped, so that code written for other engines runs.
"""

from typing import Any

import msgspec

from octavo.base.errors import RequestError, Unsupported

_TOP_EMA = "no paper and no engine says what Top-EMA sampling is. Use top_p, min_p or top_k instead."
_STRUCTURED = (
    "structured output is not there yet. Until then allowed_token_ids, bad_words or logits_processors can "
    "steer the output."
)
_REFUSED: dict[str, tuple[tuple[Any, ...], type[RequestError | Unsupported], str]] = {
    "top_ema_p": ((None,), RequestError, _TOP_EMA),
    "top_ema_d": ((None,), RequestError, _TOP_EMA),
    "structured_outputs": ((None,), Unsupported, _STRUCTURED),
    "guided_decoding": ((None,), Unsupported, _STRUCTURED),
    "guided_json": ((None,), Unsupported, _STRUCTURED),
    "guided_regex": ((None,), Unsupported, _STRUCTURED),
    "guided_choice": ((None,), Unsupported, _STRUCTURED),
    "guided_grammar": ((None,), Unsupported, _STRUCTURED),
    "watermarking": ((None,), Unsupported, "watermarks are not there yet; logits_processors can add one."),
    "trace_decode_token_ids": ((None,), Unsupported, "octavo keeps no trace of decoding: leave it None."),
    "routed_experts_prompt_start": (
        (None, 0),
        Unsupported,
        "octavo does not return routed experts: leave it 0.",
    ),
    "skip_clone": (
        (None, False, True),
        Unsupported,
        "give True or False; parameters are copied in any case.",
    ),
}
"""By name: the values that ask for nothing, and with what and why others are refused."""


class SamplingKeywords(msgspec.StructMeta):
    """Makes the parameters, once the keywords of the table are checked and dropped."""

    def __call__(cls, *args: Any, **options: Any) -> Any:
        """Raises RequestError or Unsupported for a keyword of the table, TypeError for an unknown one."""
        for name in options.keys() & _REFUSED.keys():
            accepted, error, reason = _REFUSED[name]
            if not any(options.pop(name) is value for value in accepted):
                raise error(f"{name} is not supported: {reason}")
        return super().__call__(*args, **options)
