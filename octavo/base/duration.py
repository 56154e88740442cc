"""`seconds_of`: lengths of time as people write them, for files of options and for Ollama's clients."""

import math
import re

_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def seconds_of(value: object) -> float:
    """Return the seconds of a number, or of a text like "90", "10m" and "1h30m"; inf for a negative one.

    Raises ValueError.
    """
    if isinstance(value, str):
        sign, text = (-1, value[1:]) if value.startswith("-") else (1, value)
        parts = _PART.findall(text)
        if parts and "".join(map("".join, parts)) == text:
            value = sign * sum(float(number) * _SECONDS[unit] for number, unit in parts)
        else:
            value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise ValueError("not a length of time like 90, 10m or 1h30m")
    return math.inf if value < 0 else float(value)
