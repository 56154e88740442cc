"""`CheckQueue`: the grammars that wait for a checker, and which of them is next. Part of GrammarCheck.

Tenants take turns. Small grammars compile in milliseconds, large ones may run into the time limit: of one
tenant the small come first, and the large never have all checkers.
"""

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

from octavo.base.errors import Overloaded
from octavo.messages.structured import StructuredOutputsParams, Verdict

LARGE_BYTES = 1 << 16
MAX_WAITING_BYTES = 1 << 23
"""Of one tenant."""
_RETRY_AFTER_S = 5.0


@dataclass(slots=True, eq=False)
class Job:
    """One grammar to be checked."""

    params: StructuredOutputsParams
    size: int
    future: "Future[Verdict]" = field(default_factory=Future)

    @property
    def is_large(self) -> bool:
        """Whether it may take long."""
        return self.size > LARGE_BYTES


@dataclass(slots=True)
class _Waiting:
    """Of one tenant."""

    num_bytes: int = 0
    small: deque[Job] = field(default_factory=deque)
    large: deque[Job] = field(default_factory=deque)


class CheckQueue:
    """Not thread-safe."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Waiting] = {}
        """In the order of their turns; those with nothing to check are not here."""

    def put(self, tenant: str, job: Job) -> None:
        """Add a job. Raises Overloaded when too much of this tenant waits."""
        waiting = self._tenants.get(tenant) or _Waiting()
        if waiting.num_bytes and waiting.num_bytes + job.size > MAX_WAITING_BYTES:
            raise Overloaded(
                f"Grammars of {waiting.num_bytes} bytes wait to be checked for you already, and at most "
                f"{MAX_WAITING_BYTES} may: send the request again later, or a smaller grammar.",
                retry_after_s=_RETRY_AFTER_S,
            )
        waiting.num_bytes += job.size
        (waiting.large if job.is_large else waiting.small).append(job)
        self._tenants[tenant] = waiting

    def take(self, *, allows_large: bool) -> Job | None:
        """The next job, of the tenant whose turn it is; None when there is none that may run."""
        for tenant, waiting in self._tenants.items():
            jobs = waiting.small or (waiting.large if allows_large else None)
            if jobs:
                job = jobs.popleft()
                waiting.num_bytes -= job.size
                del self._tenants[tenant]
                if waiting.small or waiting.large:
                    self._tenants[tenant] = waiting
                return job
        return None

    def close(self) -> None:
        """Nothing is checked any more: cancel what waits."""
        while (job := self.take(allows_large=True)) is not None:
            job.future.cancel()
