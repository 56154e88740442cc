"""What a node says to node 0 when it joins an engine, and the answer; `messages.worker` follows."""

import msgspec


class Join(msgspec.Struct, array_like=True, tag="join"):
    """A node wants to take its ranks."""

    node_rank: int
    host: str
    instance: str
    """A name of the process alone."""
    facts: dict[str, str]
    """What must be the same on all nodes, by name (engine/fingerprint)."""
    meeting: str = ""
    """A free address of its, where all ranks may meet."""


class Welcome(msgspec.Struct, array_like=True, tag="welcome"):
    """The node belongs to the engine. A Start follows when all are there."""


class Refused(msgspec.Struct, array_like=True, tag="refused"):
    """The node does not belong to the engine, which is not disturbed."""

    reason: str
    may_retry: bool = False
    """It has belonged before, and its loss is just being noticed."""
