"""Door 1, control: verbs for the core and what it answers; `CoreMessage` and `FrontMessage` are closed."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from octavo.base.errors import BadCheckpoint, ConfigError, EngineDead, OctavoError, RequestError, Unsupported
from octavo.messages.kv import CachePlan
from octavo.messages.request import EngineOutputs, EngineRequest

_KINDS = {kind.__name__: kind for kind in (ConfigError, BadCheckpoint, Unsupported)}
"""Errors at the start that the user can mend."""
TOGETHER = "sleep", "wake_up", "use_staged_weights"
"""Commands that all ranks and replicas obey, or none: they change what the next steps find."""
_REFUSALS: dict[str, type[OctavoError]] = {"RequestError": RequestError, "Unsupported": Unsupported}
"""Of a command, those that its caller can mend."""


def obey(commands: Mapping[str, Callable[..., Any]], verb: str, arguments: dict[str, Any]) -> Any:
    """Run a command by its name. Raises Unsupported for an unknown one, RequestError for wrong arguments."""
    if (command := commands.get(verb)) is None:
        raise Unsupported(f"Workers know no verb {verb!r}. Known: {', '.join(commands)}.")
    try:
        inspect.signature(command).bind(**arguments)
    except TypeError as error:
        raise RequestError(f"{verb} takes {inspect.signature(command)}: {error}.", "kwargs") from None
    return command(**arguments)


def kind_of(error: Exception) -> str:
    """Return the class of what a command was refused with, if the caller can mend it; "" else."""
    if isinstance(error, Unsupported):
        return "Unsupported"
    return "RequestError" if isinstance(error, RequestError | ConfigError) else ""


def refusal(text: str, kind: str) -> OctavoError:
    """Return the error as the other side raises it."""
    return _REFUSALS.get(kind, OctavoError)(text)


def core_pipe(life: int) -> str:
    """Name, in the mailbox, of the pipe that the core receives from; each core started anew has its own."""
    return f"core-{life}"


def front_pipe(front: int) -> str:
    """Name, in the mailbox, of the pipe that a front receives from."""
    return f"front-{front}"


class Start(msgspec.Struct, array_like=True, tag="start"):
    """The first message to a new process: what it shall run."""

    config: bytes
    """An EngineConfig as msgpack."""
    num_fronts: int = 1
    """Fronts of the core, numbered from 0; number 0 is its parent. (Of no meaning to ranks.)"""
    rendezvous: str = ""
    """Where ranks meet; empty: in their mailbox. (Of no meaning to a core.)"""


class Abort(msgspec.Struct, array_like=True, tag="abort"):
    """End these requests; unknown and finished ids are skipped."""

    request_ids: list[str]


class Call(msgspec.Struct, array_like=True, tag="call"):
    """Run the core's command `verb` (engine/commands) and answer with a Reply of the same call_id."""

    call_id: int
    verb: str
    arguments: dict[str, Any] = {}
    front: int = 0
    """Whom to answer."""


class Detach(msgspec.Struct, array_like=True, tag="detach"):
    """A front's process has ended: abort its requests, and say Ready to its successor."""

    front: int


class EndRequests(msgspec.Struct, array_like=True, tag="end"):
    """One front to the others, by way of the core: end requests of yours, as aborted."""

    front: int
    """Who says it."""
    request_ids: list[str] | None
    """By the names that their clients know; None: all that are open."""
    tenant: str | None = None
    """Only those of this tenant."""


class Shutdown(msgspec.Struct, array_like=True, tag="shutdown"):
    """End the core: requests still open are aborted. The core answers with the same message, its last."""


class Reply(msgspec.Struct, array_like=True, tag="reply"):
    """The answer to a Call: a result of plain types, or an error text."""

    call_id: int
    result: Any = None
    error: str = ""
    kind: str = ""
    """Class of the error if the caller can mend it."""


class Ready(msgspec.Struct, array_like=True, tag="ready"):
    """The core has loaded the model and planned its cache. It knows no request of the front that hears it."""

    plan: CachePlan
    max_model_len: int
    life: int = 0
    """How often a core was started before this one, and 1."""


class Lost(msgspec.Struct, array_like=True, tag="lost"):
    """Front 0 to the others: the core of this life has ended, and with it all its requests."""

    life: int
    error: str
    retry_after_s: float | None = None
    """About when another core says Ready; None: never."""


class Failed(msgspec.Struct, array_like=True, tag="failed"):
    """The core, or a rank, cannot start or cannot go on; nothing follows."""

    error: str
    kind: str = ""
    """Class of the error if the user can mend it (options, model files)."""

    @classmethod
    def because_of(cls, error: Exception) -> "Failed":
        """Octavo's own texts as they are, others with their type."""
        if isinstance(error, OctavoError):
            kind = type(error).__name__
            return cls(str(error), kind if kind in _KINDS else "")
        return cls(f"{type(error).__name__}: {error}")

    def to_error(self) -> OctavoError:
        """The error as the other side raises it."""
        return _KINDS.get(self.kind, EngineDead)(self.error)


CoreMessage = Start | EngineRequest | Abort | Call | Detach | EndRequests | Shutdown
FrontMessage = EngineOutputs | EndRequests | Reply | Ready | Lost | Failed | Shutdown
