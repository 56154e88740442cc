"""`run_node`: some of an engine's ranks on a machine of their own: `octavo serve --headless`.

It joins node 0, where the engine core runs, starts its ranks, and carries commands to them and answers from
them. It takes options and weights from this machine's copy of the model, all else from node 0. When it loses
node 0 it ends its ranks and joins again: an engine that starts anew finds it.
"""

import platform
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from secrets import token_hex

import msgspec

from octavo.base import env
from octavo.base.errors import ConfigError
from octavo.base.link import Spoke, Unreachable, free_address
from octavo.base.log import get_logger
from octavo.base.processes import Child
from octavo.base.transport import Broadcaster, Mailbox, Sender
from octavo.config.engine import EngineConfig
from octavo.engine.executor import WORKER
from octavo.engine.executor.multiprocess import GRACE_S, LAST_WORDS_S, NETWORK, start_rank
from octavo.engine.executor.nodes import network_defaults, place_of_hub
from octavo.engine.fingerprint import node_facts
from octavo.messages.control import Failed, Shutdown, Start
from octavo.messages.node import Join, Refused, Welcome
from octavo.messages.worker import REPLY_PIPE, WorkerReply, rank_pipe

logger = get_logger(__name__)
_SHUTDOWN = msgspec.msgpack.encode(Shutdown())
_PAUSE_S = 0.2


def run_node(
    config: EngineConfig, worker: str = WORKER, key: str | None = None, *, joins_again: bool = True
) -> None:
    """Serve node 0's engine, and those that follow it, until one ends in good order.

    key: None = OCTAVO_NODE_KEY; joins_again: False = end with the first engine
    Raises ConfigError when node 0 refuses this node or does not come in time, OSError when the model's files
    cannot be read.
    """
    parallel = config.parallel
    if not 0 < parallel.node_rank < parallel.nnodes:
        raise ConfigError(
            f"headless: node_rank ({parallel.node_rank}) must be above 0 and less than nnodes "
            f"({parallel.nnodes}); node 0 runs the engine: start it without --headless."
        )
    join = Join(parallel.node_rank, platform.node(), token_hex(8), node_facts(config))
    while not _Life(config, worker, env.node_key() if key is None else key).run(join) and joins_again:
        logger.warning("Node 0 is lost: the ranks have ended. Waiting for it.")


class _Life:
    """This node's part in one engine."""

    def __init__(self, config: EngineConfig, worker: str, key: str) -> None:
        self._config, self._worker, self._key = config, worker, key
        self._children: list[Child] = []
        self._is_ending = False

    def run(self, join: Join) -> bool:
        """Join node 0 and work. Returns True if the engine has ended in good order, False if it was lost."""
        with ExitStack() as opened:
            spoke = self._meet(join)
            opened.callback(spoke.close)
            first = spoke.receive(float(self._config.parallel.distributed_timeout_seconds))
            if first is None or first == _SHUTDOWN:
                return first is not None
            mailbox = Mailbox.create()
            opened.callback(mailbox.close)
            ranks = self._config.parallel.node_ranks
            commands = Broadcaster[Start]([mailbox.address(rank_pipe(rank)) for rank in ranks])
            opened.callback(commands.close, linger_s=0.0)
            opened.callback(self._end_ranks, 0.0)
            self._start_ranks(mailbox)
            commands.send(self._localized(first))
            for frame in spoke.frames(mailbox.address(REPLY_PIPE)):
                commands.send_frame(frame)
                if frame == _SHUTDOWN:
                    self._end_ranks(GRACE_S)
                    return True
        return False

    def _meet(self, join: Join) -> Spoke:
        """Return the connection to node 0, which has taken this node. Raises ConfigError."""
        parallel = self._config.parallel
        deadline_s = time.monotonic() + parallel.distributed_timeout_seconds
        where = f"{parallel.master_addr}:{parallel.master_port}"
        logger.info("Node %d looks for node 0 at %s.", parallel.node_rank, where)
        while (left_s := deadline_s - time.monotonic()) > 0:
            with suppress(Unreachable):  # names of machines may come later than machines
                self._place = place_of_hub(parallel, self._key)
                if (spoke := self._ask(join, left_s)) is not None:
                    logger.info("Node %d belongs to the engine.", parallel.node_rank)
                    return spoke
            time.sleep(_PAUSE_S)
        raise ConfigError(
            f"Node 0 has not answered at {where} within {parallel.distributed_timeout_seconds} s: is it "
            "running there?"
        )

    def _ask(self, join: Join, timeout_s: float) -> Spoke | None:
        """Return a connection if node 0 answers that this node belongs. Raises ConfigError if it does not."""
        join = msgspec.structs.replace(join, meeting=free_address(self._place.own_address()))
        spoke = Spoke(self._place)
        answer = None
        try:
            spoke.send(msgspec.msgpack.encode(join))
            if (frame := spoke.receive(timeout_s)) is not None:
                answer = msgspec.msgpack.decode(frame, type=Welcome | Refused)
            if isinstance(answer, Refused) and not answer.may_retry:
                raise ConfigError(f"Node 0 refuses this node: {answer.reason}")
            return spoke if isinstance(answer, Welcome) else None
        finally:
            if not isinstance(answer, Welcome):
                spoke.close()

    def _start_ranks(self, mailbox: Mailbox) -> None:
        environment = {**NETWORK, **network_defaults(self._place)}
        replies = mailbox.address(REPLY_PIPE)
        for rank in self._config.parallel.node_ranks:
            lost = partial(self._tell_end, replies, rank)
            self._children.append(start_rank(mailbox, rank, self._worker, lost, environment))

    def _localized(self, frame: bytes) -> Start:
        """Return node 0's Start with the paths and threads of this machine."""
        start, own = msgspec.msgpack.decode(frame, type=Start), self._config
        config = _with_files_of(EngineConfig.from_msgpack(start.config), own)
        if config.draft is not None and own.draft is not None:
            config = replace(config, draft=_with_files_of(config.draft, own.draft))
        parallel = replace(
            config.parallel, node_rank=own.parallel.node_rank, cpu_threads=own.parallel.cpu_threads
        )
        return msgspec.structs.replace(start, config=replace(config, parallel=parallel).to_msgpack())

    def _tell_end(self, replies: str, rank: int, code: int) -> None:
        """Thread of a rank's watcher: the process has ended. Its own account of why goes first."""
        time.sleep(LAST_WORDS_S)
        if not self._is_ending:
            pipe: Sender[WorkerReply] = Sender(replies)
            node = self._config.parallel.node_rank
            pipe.send(Failed(f"The process of rank {rank} on node {node} ended with exit code {code}."))
            pipe.close()

    def _end_ranks(self, grace_s: float) -> None:
        self._is_ending = True
        deadline_s = time.monotonic() + grace_s
        while self._children:
            self._children.pop().end(max(0.0, deadline_s - time.monotonic()))


def _with_files_of(config: EngineConfig, own: EngineConfig) -> EngineConfig:
    return replace(
        config,
        model=replace(config.model, model=own.model.model),
        checkpoint=replace(config.checkpoint, path=own.checkpoint.path),
    )
