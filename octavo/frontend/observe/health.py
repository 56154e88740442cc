"""`Health`: what a front knows of its engine at this moment. For /health, /ready and supervisors."""

from dataclasses import dataclass
from typing import Literal

HealthState = Literal["starting", "ready", "draining", "stalled", "restarting", "dead"]


@dataclass(frozen=True, slots=True)
class Health:
    """The truth about the loop that makes the steps, not about the front."""

    state: HealthState
    reason: str
    """Why it is neither starting nor ready; else empty."""
    num_restarts: int
    """Cores started in the place of dead ones."""
    last_step_age_s: float
    """Since the last step, as far as it was heard of; since the start when there was none."""
    num_running: int
    num_waiting: int
