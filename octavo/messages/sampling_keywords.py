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
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "top_ema_p": ((None,), _TOP_EMA),
    "top_ema_d": ((None,), _TOP_EMA),
    "structured_outputs": ((None,), _STRUCTURED),
    "guided_decoding": ((None,), _STRUCTURED),
    "guided_json": ((None,), _STRUCTURED),
    "guided_regex": ((None,), _STRUCTURED),
    "guided_choice": ((None,), _STRUCTURED),
    "guided_grammar": ((None,), _STRUCTURED),
    "watermarking": ((None,), "watermarks are not there yet; logits_processors can add one."),
    "trace_decode_token_ids": ((None,), "octavo keeps no trace of decoding: leave it None."),
    "routed_experts_prompt_start": ((None, 0), "octavo does not return routed experts: leave it 0."),
    "skip_clone": ((None, False, True), "give True or False; parameters are copied in any case."),
}
"""By name: the values that ask for nothing, and why others are refused."""


class SamplingKeywords(msgspec.StructMeta):
    """Makes the parameters, once the keywords of the table are checked and dropped."""

    def __call__(cls, *args: Any, **options: Any) -> Any:
        """Raises RequestError or Unsupported for a keyword of the table, TypeError for an unknown one."""
        for name in options.keys() & _REFUSED.keys():
            value = options.pop(name)
            accepted, reason = _REFUSED[name]
            if not any(value is neutral for neutral in accepted):
                text = f"{name} is not supported: {reason}"
                raise RequestError(text, name) if reason is _TOP_EMA else Unsupported(text)
        return super().__call__(*args, **options)
