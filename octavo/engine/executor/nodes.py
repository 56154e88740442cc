"""`Nodes`: the other machines of an engine, as the executor on node 0 sees them.

A node is heard before anything is loaded: it must bring a rank of its own and the same octavo, torch, sizes
and model (`fingerprint.node_facts`). One that does not is told why, and the right one is waited for.
"""

import threading
import time
from collections.abc import Callable

import msgspec

from octavo.base.errors import ConfigError, EngineDead, OctavoError
from octavo.base.link import Hub, Place, free_address
from octavo.base.log import get_logger
from octavo.base.transport import BadFrame, Mailbox, decode
from octavo.config.engine import EngineConfig
from octavo.config.parallel import ParallelConfig
from octavo.engine.fingerprint import node_facts
from octavo.messages.node import Join, Refused, Welcome
from octavo.messages.worker import REPLY_PIPE, node_pipe

logger = get_logger(__name__)
_POLL_S = 0.2


def place_of_hub(parallel: ParallelConfig, key: str) -> Place:
    """Return where node 0 listens. Raises ConfigError when the address cannot be found."""
    return Place(parallel.master_addr, parallel.master_port, key, parallel.node_timeout).resolved()


def network_defaults(place: Place) -> dict[str, str]:
    """Return the variables by which torch.distributed uses the interface that leads to node 0."""
    interface = place.own_interface()
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}


class Nodes:
    """Waits for all nodes, then carries commands to them and answers from them."""

    def __init__(
        self, config: EngineConfig, mailbox: Mailbox, on_loss: Callable[[OctavoError], None], key: str
    ) -> None:
        """Listen. Raises ConfigError when address or port cannot be used."""
        self._parallel, self._facts = config.parallel, node_facts(config)
        self._joined: dict[int, Join] = {}
        self._on_loss = on_loss
        self._are_complete = threading.Event()
        self._decoder: msgspec.msgpack.Decoder[Join] = msgspec.msgpack.Decoder(Join)
        self.place = place_of_hub(config.parallel, key)
        numbers = range(1, config.parallel.nnodes)
        pipes = {number: mailbox.address(node_pipe(number)) for number in numbers}
        self.pipes = list(pipes.values())
        self._hub = Hub(self.place, pipes, mailbox.address(REPLY_PIPE), self._admit, self._lose)
        self.close = self._hub.close

    def wait(self, find_error: Callable[[], OctavoError | None]) -> None:
        """Return when all nodes are there. Raises ConfigError if one does not come, and what is found."""
        parallel = self._parallel
        logger.info("Node 0 waits at %s for %d others.", self.place, len(self.pipes))
        deadline_s = time.monotonic() + parallel.distributed_timeout_seconds
        while not self._are_complete.wait(_POLL_S):
            if (error := find_error()) is not None:
                raise error
            if time.monotonic() < deadline_s:
                continue
            missing = ", ".join(str(n) for n in range(1, parallel.nnodes) if n not in self._joined)
            raise ConfigError(
                f"Node {missing} has not come to {self.place} within {parallel.distributed_timeout_seconds} "
                f"s. Start it by: octavo serve MODEL --headless --nnodes {parallel.nnodes} --node-rank "
                f"{missing.partition(',')[0]} --master-addr {parallel.master_addr} --master-port "
                f"{parallel.master_port}, with the other options and OCTAVO_NODE_KEY as here."
            )

    @property
    def rendezvous(self) -> str:
        """Return where all ranks meet: at rank 0."""
        return free_address(self.place.host) if self._parallel.node_ranks else self._joined[1].meeting

    def _admit(self, frame: bytes) -> tuple[bytes, int | None]:
        try:
            join = decode(self._decoder, frame)
        except BadFrame:
            refused = Refused("Its version of octavo is another one than node 0 has.")
        else:
            rank, other = join.node_rank, self._joined.get(join.node_rank)
            may_retry = other is not None and other.instance == join.instance
            refused = Refused(self._objection(join, other), may_retry)
            if may_retry:
                self._lose(rank)
        if refused.reason:
            logger.warning("A node was refused: %s", refused.reason)
            return msgspec.msgpack.encode(refused), None
        self._joined[rank] = join
        logger.info("Node %d is there (%s).", rank, join.host)
        if len(self._joined) == len(self.pipes):
            self._are_complete.set()
        return msgspec.msgpack.encode(Welcome()), rank

    def _objection(self, join: Join, other: Join | None) -> str:
        rank, nnodes = join.node_rank, self._parallel.nnodes
        different = [
            f"{name} ({join.facts.get(name, 'none')} there, {self._facts.get(name, 'none')} on node 0)"
            for name in self._facts | join.facts
            if join.facts.get(name) != self._facts.get(name)
        ]
        if different:
            return f"Node {rank} ({join.host}) differs from node 0 in {', '.join(different)}."
        if not 0 < rank < nnodes:
            return f"node_rank ({rank}) must be above 0 and less than nnodes ({nnodes})."
        if other is not None:
            return f"Node {rank} is there already ({other.host}): every node has a node_rank of its own."
        return ""

    def _lose(self, number: int) -> None:
        lost = self._joined[number]
        if not self._are_complete.is_set():
            del self._joined[number]  # its place is free again
            return
        self._on_loss(
            EngineDead(
                f"Node {number} ({lost.host}) is lost: it has ended, or was silent for "
                f"{self.place.silence_s:g} s."
            )
        )
