"""Numbers as people write them: with a unit. Used wherever the command line reads a number."""

import argparse
import json
import re
from fractions import Fraction
from typing import Any

_NUMBER = re.compile(r"([+-]?\d+(?:\.\d+)?)([kmgtKMGT]?)(iB|B)?")
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def whole_number(text: str) -> int:
    """An integer with an optional unit: 4096, 8k and 2GB (powers of 1000), 8K, 1M and 2GiB (of 1024)."""
    match = _NUMBER.fullmatch(text.strip())
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number like 4096, 8k, 1M or 2GiB")
    digits, unit, byte = match.groups()
    binary = byte == "iB" or (unit.isupper() and byte is None)
    value = Fraction(digits) * (1024 if binary else 1000) ** _POWERS[unit.lower()]
    if value.denominator != 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(value)


def any_value(text: str) -> Any:
    """What `text` is in JSON, or as a number with a unit, or else itself; None for the word None."""
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return whole_number(text)
    except argparse.ArgumentTypeError:
        return None if text == "None" else text
