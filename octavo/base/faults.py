"""Faults on purpose: named sites in the code that fail when they are told to. For tests of faults only.

OCTAVO_FAULT=site:action@k,…: at its k-th use (the first, when not said) the site does what the action says:
raise, memory (MemoryError), sleep=SECONDS, exit (code 3), kill9, nan=ROW (that row of the site's numbers).
A site that says whose work it does fails from then on at all work of the same owner, as a real fault of one
request would. Sites: core.decode_add, core.step, worker.forward, worker.sample, out.encode, detok, logprobs,
tokenize, template. With nothing armed a site costs one look at an empty dict.
"""

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from octavo.base import env
from octavo.base.errors import ConfigError
from octavo.base.log import get_logger

logger = get_logger(__name__)
_ACTIONS = ("raise", "memory", "sleep", "exit", "kill9", "nan")
_EXIT_CODE = 3


class Fault(RuntimeError):
    """What a site raises; like a bug of ours, it is no OctavoError."""


@dataclass
class _Order:
    """One site's order."""

    action: str
    value: float
    at: int
    num_uses: int = 0
    owner: object = None
    """Whose work failed."""


_armed: dict[str, _Order] = {}


def hit(site: str, owner: object = None, rows: Any = None) -> None:
    """Fail if told to; owner: whose work this is; rows: what `nan` spoils a row of."""
    if _armed and (order := _armed.get(site)) is not None:
        _obey(site, order, owner, rows)


def hit_each(site: str, owners: Iterable[object]) -> None:
    """`hit` for each of these owners."""
    if site in _armed:
        for owner in owners:
            hit(site, owner)


def arm(orders: str) -> None:
    """Take orders in the form of OCTAVO_FAULT; none are left from before. Raises ConfigError."""
    _armed.clear()
    for text in filter(None, orders.split(",")):
        site, _, rest = text.partition(":")
        what, _, at = rest.partition("@")
        action, _, value = what.partition("=")
        try:
            _armed[site] = _Order(action, float(value or 0), int(at or 1))
        except ValueError:
            action = ""
        if action not in _ACTIONS:
            raise ConfigError(
                f"OCTAVO_FAULT={text!r}: say site:action@k, action one of {', '.join(_ACTIONS)}."
            )
    if _armed:
        logger.warning("Faults on purpose: %s", orders)


def _obey(site: str, order: _Order, owner: object, rows: Any) -> None:
    order.num_uses += 1
    if order.num_uses == order.at:
        order.owner = owner
    elif owner is None or owner != order.owner:
        return
    match order.action:
        case "raise":
            raise Fault(f"{site} was told to fail")
        case "memory":
            raise MemoryError
        case "sleep":
            time.sleep(order.value)
        case "exit":
            os._exit(_EXIT_CODE)
        case "kill9":
            os.kill(os.getpid(), signal.SIGKILL)
        case "nan":
            rows[int(order.value)] = float("nan")


arm(env.fault())
