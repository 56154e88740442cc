"""`ExpertBalancer` moves experts between ranks by their load, a layer per step. A part of the runner's steps.

All ranks compute or join the same steps, and add up the tokens that they have counted: so they decide alike.
"""

from collections.abc import Callable

from torch import Tensor, distributed

from octavo.base.log import get_logger
from octavo.config.expert_load import ExpertLoad
from octavo.messages.step import NewRequest, SchedulerOutput
from octavo.runtime.distributed.group import Group
from octavo.runtime.layers.expert_placement import ExpertPlacement, Move, balancedness, moves, place_experts
from octavo.runtime.layers.experts import Experts
from octavo.runtime.models.interface import Model
from octavo.runtime.worker.lockstep import Lockstep
from octavo.runtime.worker.pending import PendingStep
from octavo.runtime.worker.prepare import Work
from octavo.runtime.worker.step_part import StepPart

logger = get_logger(__name__)
_WORTH = 1.02
"""A layer is rearranged if that improves its balance by so much."""


class ExpertBalancer(StepPart):
    """Counts steps; at the end of an interval the layers have their turn."""

    def __init__(
        self, load: ExpertLoad, ranks: Group, model: Callable[[], Model], lockstep: Lockstep | None
    ) -> None:
        super().__init__()
        if lockstep is not None:
            lockstep.joined = self.count
        self._load, self._ranks, self._model = load, ranks, model
        self._num_steps = self._num_waiting = 0

    def read(self, request: NewRequest) -> None:
        """See StepPart: requests want nothing of it."""

    def follow(self, step: SchedulerOutput, work: Work, hidden: Tensor | None, outcome: PendingStep) -> None:
        self.count()

    def count(self) -> None:
        """Count a step, of this replica or of others with which it shares experts."""
        self._num_steps += 1
        place, interval = self._num_steps % self._load.step_interval, self._load.step_interval
        if self._num_steps == 1 or 0 < place == interval - self._load.window_size:
            for _, placement in self._balanced():
                placement.load.zero_()
        if place == 0:
            self._num_waiting = len(self._balanced())
        if self._num_waiting:
            self._num_waiting -= 1
            self._rearrange(*self._balanced()[self._num_waiting])

    def _balanced(self) -> list[tuple[Experts, ExpertPlacement]]:
        every = [module for module in self._model().modules() if isinstance(module, Experts)]
        return [(experts, experts.placement) for experts in every if experts.placement is not None]

    def _rearrange(self, experts: Experts, placement: ExpertPlacement) -> None:
        load: list[int] = self._ranks.all_reduce_by_nccl(placement.load).tolist()
        placement.load.zero_()
        before = placement.places
        after = place_experts(load, before)
        balances = balancedness(load, before), balancedness(load, after)
        if self._load.log_balancedness:
            logger.info("Experts: balance %.2f, %.2f if they are moved.", *balances)
        if balances[1] >= _WORTH * balances[0]:
            changes = moves(before, after)
            for tensor in experts.experts.slots():
                self._move(tensor, changes)
            placement.use(after)

    def _move(self, tensor: Tensor, changes: list[Move]) -> None:
        """Send and receive entries of a tensor, [places, …]; nothing is overwritten before it is sent."""
        rank, group = self._ranks.rank, self._ranks.process_group
        operations, arrived = list[distributed.P2POp](), dict[int, Tensor]()
        for move in changes:
            if rank not in (move.source, move.target):
                continue
            part = tensor[move.source_place if move.source == rank else 0].clone()
            if move.target == rank:
                arrived[move.target_place] = part
            if move.source != move.target:
                operation = distributed.isend if move.source == rank else distributed.irecv
                other = move.target if move.source == rank else move.source
                operations.append(distributed.P2POp(operation, part, group=group, group_peer=other))
        for sent in distributed.batch_isend_irecv(operations) if operations else ():
            sent.wait()
        for place, part in arrived.items():
            tensor[place].copy_(part)
