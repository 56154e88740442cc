"""What a request asks for beside its prompt and its sampling parameters: checked, and in the engine's terms.

Called by the input processor.
"""

from octavo.base.errors import RequestError
from octavo.messages import sampling_values as read
from octavo.messages.request import Standing


def check_standing(arrival_s: float, priority: int, tenant: str, deadline_s: float | None) -> Standing:
    """Return the standing of a request that arrives at `arrival_s`, monotonic.

    deadline_s: seconds after the arrival. Raises RequestError.
    """
    if type(priority) is not int or not -(2**31) <= priority < 2**31:
        raise RequestError(f"priority must be an integer of 32 bits, got {priority!r}.", "priority")
    if not isinstance(tenant, str) or not tenant.isprintable():
        raise RequestError(f"tenant must be a printable string, got {tenant!r}.", "tenant")
    if deadline_s is not None and read.number(deadline_s, "deadline_s") <= 0:
        raise RequestError(f"deadline_s must be greater than zero, got {deadline_s}.", "deadline_s")
    return Standing(
        arrival_s, priority, tenant, None if deadline_s is None else arrival_s + float(deadline_s)
    )
