"""`HotExperts` gives the device's copies of experts to those that tokens take most, between steps."""

from collections.abc import Callable

from octavo.messages.step import NewRequest
from octavo.runtime.models.interface import Model
from octavo.runtime.worker.prepare import Work
from octavo.runtime.worker.step_part import StepPart


class HotExperts(StepPart):
    """Asks the model's cache of experts before each step."""

    def __init__(self, model: Callable[[], Model]) -> None:
        super().__init__()
        self._model = model

    def read(self, request: NewRequest) -> None:
        """No request wants anything."""

    def begin(self, work: Work) -> None:
        """Let experts move before the step is given out."""
        self._model().expert_cache.rearrange()
