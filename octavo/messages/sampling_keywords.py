"""Keywords of `SamplingParams` from other engines: older names of a field, and what octavo does not serve.

The latter are refused with a reason, not as unknown. The values that ask for nothing are accepted and
dropped, so that code written for other engines runs.
"""

from typing import Any

import msgspec

from octavo.base.errors import RequestError, Unsupported
from octavo.messages.structured import StructuredOutputsParams

_TOP_EMA = "no paper and no engine says what Top-EMA sampling is. Use top_p, min_p or top_k instead."
_GUIDED = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar", "json_object")}
"""Fields of StructuredOutputsParams that were keywords of their own."""
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "top_ema_p": ((None, 0.0, 0), _TOP_EMA),
    "top_ema_d": ((None, 0, 0.0), _TOP_EMA),
    "multiple_stop_sequences": ((None, False, True), "give True or False; `stop` takes several in any case."),
    "watermarking": ((None,), "watermarks are not there yet; logits_processors can add one."),
    "trace_decode_token_ids": ((None,), "octavo keeps no trace of decoding: leave it None."),
    "routed_experts_prompt_start": ((None, 0), "octavo does not return routed experts: leave it 0."),
    "skip_clone": ((None, False, True), "give True or False; parameters are copied in any case."),
}
"""By name: the values that ask for nothing, and why others are refused."""


class SamplingKeywords(msgspec.StructMeta):
    """Makes the parameters, once such keywords are renamed, or checked and dropped."""

    def __call__(cls, *args: Any, **options: Any) -> Any:
        """Raises RequestError or Unsupported for a keyword of the table, TypeError for an unknown one."""
        for name in options.keys() & _REFUSED.keys():
            value = options.pop(name)
            accepted, reason = _REFUSED[name]
            if not any(type(value) is type(neutral) and value == neutral for neutral in accepted):
                text = f"{name} is not supported: {reason}"
                raise RequestError(text, name) if reason is _TOP_EMA else Unsupported(text)
        _rename_guided(options)
        return super().__call__(*args, **options)


def _rename_guided(options: dict[str, Any]) -> None:
    """`guided_decoding` and its like become `structured_outputs`."""
    given = {name: options.pop(name) for name in ("guided_decoding", *_GUIDED) if name in options}
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        return
    if len(given) > 1 or options.get("structured_outputs") is not None:
        raise RequestError(
            f"{', '.join(given)} {'is an older name' if len(given) == 1 else 'are older names'} of "
            "structured_outputs: give one constraint.",
            "structured_outputs",
        )
    [(name, value)] = given.items()
    kind = _GUIDED.get(name)
    options["structured_outputs"] = StructuredOutputsParams(**{kind: value}) if kind else value
