"""Keywords of `SamplingParams` from other engines: older names of a field, and what octavo does not serve.

The latter are refused with a reason, not as unknown. The values that ask for nothing are accepted and
dropped, so that code written for other engines runs.
"""

from typing import Any

import msgspec

from octavo.base.errors import RequestError, Unsupported
from octavo.base.foreign import SAMPLING, TOP_EMA
from octavo.messages.structured import StructuredOutputsParams

_GUIDED = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar", "json_object")}
"""Fields of StructuredOutputsParams that were keywords of their own."""


class SamplingKeywords(msgspec.StructMeta):
    """Makes the parameters, once such keywords are renamed, or checked and dropped."""

    def __call__(cls, *args: Any, **options: Any) -> Any:
        """Raises RequestError or Unsupported for a keyword of the table, TypeError for an unknown one."""
        for name in options.keys() & SAMPLING.keys():
            foreign = SAMPLING[name]
            if foreign.asks(options.pop(name)):
                text = f"{name} is not supported: {foreign.text}"
                raise RequestError(text, name) if foreign.text is TOP_EMA else Unsupported(text)
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
