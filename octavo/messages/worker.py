"""Door 2 between processes: what the executor tells its ranks, and what they answer.

Every rank answers Start with Loaded, Allocate and Call with Returned; only rank 0 answers Execute. A rank
that says Failed has ended.
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


class Allocate(msgspec.Struct, array_like=True, tag="allocate"):
    """Make the cache tensors."""

    plan: CachePlan


class Execute(msgspec.Struct, array_like=True, tag="execute"):
    """Run one step."""

    step: SchedulerOutput


class Sample(msgspec.Struct, array_like=True, tag="sample"):
    """End the step given last, whose masks had to follow."""

    masks: TokenMasks


class Loaded(msgspec.Struct, array_like=True, tag="loaded"):
    """This rank has its weights."""

    rank: int
    ready: ModelReady


class Returned(msgspec.Struct, array_like=True, tag="returned"):
    """The end of an Allocate or a Call: a result of plain types, or an error text."""

    rank: int
    result: Any = None
    error: str = ""


class Executed(msgspec.Struct, array_like=True, tag="executed"):
    """What a step brought."""

    output: ModelRunnerOutput


WorkerCommand = Start | Allocate | Execute | Sample | Call | Shutdown
WorkerReply = Loaded | Returned | Executed | Failed
