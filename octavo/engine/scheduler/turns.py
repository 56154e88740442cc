"""`StageTurns`: which running requests a step takes where stages compute different ones at a time."""

from collections.abc import Sequence

from octavo.engine.scheduler.plan import StepPlan
from octavo.engine.scheduler.request import Request


class StageTurns:
    """Divides the running requests into as many parts as there are stages, which take turns.

    A request's next step may be given out before its last one was read: the first stage waits on the device
    for the token. So turns only keep all stages busy; no result depends on them.
    """

    def __init__(self, num_stages: int) -> None:
        self.is_piped = num_stages > 1
        self._num_stages = num_stages
        self._share, self._recent = 0, 0

    def begin(self, order: Sequence[Request], step_id: int) -> "StageTurns | None":
        """Find out who had a turn in one of the last steps, of which there is one per stage but this.

        If all had one, all may go on. Returns None where nobody waits for a turn: there is one stage.
        """
        if not self.is_piped:
            return None
        self._share, self._recent = -(-len(order) // self._num_stages), step_id - self._num_stages + 1
        if all(self._is_under_way(request) for request in order):
            self._recent = step_id
        return self

    def leaves_out(self, request: Request, plan: StepPlan) -> bool:
        """Return True if others have their turn."""
        return len(plan.requests) >= self._share or self._is_under_way(request)

    def end(self, plan: StepPlan) -> None:
        """Note whose turn it was."""
        if self.is_piped:
            for request in plan.requests:
                request.last_step = plan.step_id

    def _is_under_way(self, request: Request) -> bool:
        return request.last_step >= self._recent and request.num_pending > 0
