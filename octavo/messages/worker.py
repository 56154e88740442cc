"""Door 2 between processes: what the executor tells its ranks, and what they answer.

Every rank answers Beat with Alive, Start with Loaded, CachePlan (allocate it) and Call with Returned; only
rank 0 answers SchedulerOutput (run this step), or the TokenMasks that follow it. A rank that says Failed has
ended.
"""

from typing import Any

import msgspec

from octavo.messages.control import Call, Failed, Shutdown, Start
from octavo.messages.kv import CachePlan, ModelReady
from octavo.messages.step import ModelRunnerOutput, SchedulerOutput, TokenMasks

REPLY_PIPE = "replies"
"""Name, in the mailbox, of the pipe that all ranks answer through."""


def rank_pipe(rank: int) -> str:
    """Name, in the mailbox, of the pipe that `rank` receives from."""
    return f"rank{rank}"


def node_pipe(node: int) -> str:
    """Name, in node 0's mailbox, of the pipe by which `node` receives."""
    return f"node{node}"


class Beat(msgspec.Struct, array_like=True, tag="beat"):
    """Say that you are there."""


class Alive(msgspec.Struct, array_like=True, tag="alive"):
    """The answer to a Beat."""

    rank: int


class Loaded(msgspec.Struct, array_like=True, tag="loaded"):
    """This rank has its weights."""

    rank: int
    ready: ModelReady


class Returned(msgspec.Struct, array_like=True, tag="returned"):
    """The end of a CachePlan or a Call: a result of plain types, or an error text."""

    rank: int
    result: Any = None
    error: str = ""
    kind: str = ""
    """See control.kind_of."""


WorkerCommand = Start | CachePlan | SchedulerOutput | TokenMasks | Call | Beat | Shutdown
WorkerReply = Loaded | Returned | ModelRunnerOutput | Alive | Failed
