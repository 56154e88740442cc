"""`Standing`: where a request stands among the others; which of it counts is the scheduling policy's affair.

Made by the input processor, which puts it into the engine requests.
"""

from typing import NamedTuple

from octavo.base.errors import RequestError
from octavo.messages import sampling_values as read


class Standing(NamedTuple):
    """Checked, and in the terms of the engine: times are monotonic."""

    arrival_s: float
    priority: int
    tenant: str
    due_s: float | None

    @classmethod
    def check(cls, arrival_s: float, priority: int, tenant: str, deadline_s: float | None) -> "Standing":
        """deadline_s: seconds after the arrival. Raises RequestError."""
        if type(priority) is not int or not -(2**31) <= priority < 2**31:
            raise RequestError(f"priority must be an integer of 32 bits, got {priority!r}.", "priority")
        if not isinstance(tenant, str) or not tenant.isprintable():
            raise RequestError(f"tenant must be a printable string, got {tenant!r}.", "tenant")
        if deadline_s is not None and read.number(deadline_s, "deadline_s") <= 0:
            raise RequestError(f"deadline_s must be greater than zero, got {deadline_s}.", "deadline_s")
        return cls(arrival_s, priority, tenant, None if deadline_s is None else arrival_s + float(deadline_s))
