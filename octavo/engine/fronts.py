"""`Fronts`: the front processes of one core. Who owns which request, and the pipe to each.

Owned by the core's process. Front 0 is the core's parent: its queue, when it is full, holds the core up. One
of the others must not stand in everybody's way: it loses its requests and is greeted as if it were new.
"""

import time
from collections.abc import Callable, Iterable

import msgspec

from octavo.base import faults
from octavo.base.errors import Overloaded
from octavo.base.log import get_logger
from octavo.base.transport import Mailbox, Sender
from octavo.messages.control import FrontMessage, Ready, front_pipe
from octavo.messages.request import EngineOutput, EngineOutputs, EngineRequest, FinishReason, SchedulerStats

logger = get_logger(__name__)
BEAT_S = 0.5
"""Longest silence of a core that lives."""
_OWNER = 0


class Fronts:
    """Pipes by number of front; used by one thread."""

    def __init__(self, mailbox: Mailbox, life: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        """Only front 0, until `admit`. life: the core's number"""
        self._mailbox = mailbox
        self._life = life
        self._clock = clock
        self._pipes = [self._open(_OWNER)]
        self._heard_s = [clock()]
        """When each was last told something."""
        self._owners: dict[str, int] = {}
        self._orphans: list[str] = []
        self._num_steps = 0
        self._ready: Ready | None = None

    def admit(self, num_fronts: int) -> None:
        """Open pipes for so many fronts, those that have one already included."""
        for front in range(len(self._pipes), num_fronts):
            self._pipes.append(self._open(front))
            self._heard_s.append(self._clock())

    def greet(self, ready: Ready) -> None:
        """Tell all that the core is there."""
        self._ready = ready
        for front in range(len(self._pipes)):
            self.tell(front, ready)

    def own(self, request: EngineRequest) -> None:
        """Remember whom the outputs of `request` are for; an id in use keeps its owner."""
        front = request.front if 0 <= request.front < len(self._pipes) else _OWNER
        self._owners.setdefault(request.request_id, front)

    def disown(self, request_ids: Iterable[str]) -> None:
        """These requests are over."""
        for request_id in request_ids:
            self._owners.pop(request_id, None)

    def take_orphans(self) -> list[str]:
        """Return the requests that nobody waits for any more; the core is to abort them."""
        orphans, self._orphans = self._orphans, []
        return orphans

    def detach(self, front: int) -> None:
        """Orphan the front's requests, drop what it has not read, and greet whoever binds its pipe next."""
        if not 0 < front < len(self._pipes):
            logger.warning("There is no front %d to detach.", front)
            return
        orphans = [request_id for request_id, owner in self._owners.items() if owner == front]
        self.disown(orphans)
        self._orphans += orphans
        self._pipes[front].close(linger_s=0.0)
        self._pipes[front] = self._open(front)
        if self._ready is not None:
            self.tell(front, self._ready)

    def deliver(self, outputs: EngineOutputs) -> None:
        """Hand out what a step brought. Front 0 hears of every step, the others at least twice a second."""
        by_front = self._by_front(outputs.outputs)
        now, stats = self._clock(), outputs.stats
        has_stepped, self._num_steps = stats.num_steps > self._num_steps, stats.num_steps
        for front, heard_s in enumerate(self._heard_s):
            own = by_front.get(front, [])
            if own or (has_stepped and front == _OWNER) or now - heard_s >= BEAT_S:
                self._send_outputs(front, own, stats)
        self.disown([output.request_id for output in outputs.outputs if output.finish_reason is not None])

    def abort_all(self) -> None:
        """Every request ends exactly once, also when the core ends."""
        for front in range(len(self._pipes)):
            ids = sorted(request_id for request_id, owner in self._owners.items() if owner == front)
            ends = [EngineOutput(i, [], finish_reason=FinishReason.ABORT) for i in ids]
            self._send_outputs(front, ends, SchedulerStats())
        self._owners.clear()

    def pass_on(self, message: FrontMessage, sender: int) -> None:
        """Tell all others."""
        for front in range(len(self._pipes)):
            if front != sender:
                self.tell(front, message)

    def tell(self, front: int, message: FrontMessage) -> None:
        """Send a message. Raises TypeError or ValueError when it cannot be encoded."""
        if not 0 <= front < len(self._pipes):
            logger.warning("There is no front %d to be told.", front)
            return
        pipe = self._pipes[front]
        self._heard_s[front] = self._clock()
        if front == _OWNER:
            pipe.send(message)
            return
        try:
            pipe.try_send(message)
        except Overloaded:
            logger.error("Front %d has stopped reading: its requests are dropped.", front)
            self.detach(front)

    def close(self) -> None:
        """Close all pipes; what front 0 has not read stays readable for a moment."""
        for front, pipe in enumerate(self._pipes):
            pipe.close(linger_s=1.0 if front == _OWNER else 0.1)

    def _by_front(self, outputs: list[EngineOutput]) -> dict[int, list[EngineOutput]]:
        """Return what each is to get; a front that is alone drops by itself what nobody waits for."""
        if len(self._pipes) == 1:
            return {_OWNER: outputs}
        by_front: dict[int, list[EngineOutput]] = {}
        for output in outputs:
            front = self._owners.get(output.request_id)
            if front is not None:
                by_front.setdefault(front, []).append(output)
        return by_front

    def _open(self, front: int) -> Sender[FrontMessage]:
        return Sender(self._mailbox.address(front_pipe(front)))

    def _send_outputs(self, front: int, outputs: list[EngineOutput], stats: SchedulerStats) -> None:
        """Send them; one that cannot be encoded ends its own request and no other."""
        try:
            faults.hit_each("out.encode", (output.request_id for output in outputs))
            self.tell(front, EngineOutputs(outputs, stats, life=self._life))
        except Exception:
            logger.exception("Outputs cannot be sent as they are.")
            outputs = [self._sendable(output) for output in outputs]
            self.tell(front, EngineOutputs(outputs, stats, life=self._life))

    def _sendable(self, output: EngineOutput) -> EngineOutput:
        try:
            faults.hit("out.encode", output.request_id)
            msgspec.msgpack.encode(output)
        except Exception:
            self.disown([output.request_id])
            self._orphans.append(output.request_id)
            text = "Internal error while sending the output of this request."
            return EngineOutput.failed(output.request_id, text)
        return output
