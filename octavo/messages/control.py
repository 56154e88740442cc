"""Door 1, control: verbs for the core and what it answers; `CoreMessage` and `FrontMessage` are closed."""

from typing import Any

import msgspec

from octavo.messages.kv import CachePlan
from octavo.messages.request import EngineOutputs, EngineRequest

CORE_PIPE = "core"
FRONT_PIPE = "front"
"""Names, in the mailbox, of the pipe each end of the door receives from."""


class Start(msgspec.Struct, array_like=True, tag="start"):
    """The first message to a new process: what it shall run."""

    config: bytes
    """An EngineConfig as msgpack."""


class Abort(msgspec.Struct, array_like=True, tag="abort"):
    """End these requests; unknown and finished ids are skipped."""

    request_ids: list[str]


class Call(msgspec.Struct, array_like=True, tag="call"):
    """Run the core's command `verb` (engine/commands) and answer with a Reply of the same call_id."""

    call_id: int
    verb: str
    arguments: dict[str, Any] = {}


class Shutdown(msgspec.Struct, array_like=True, tag="shutdown"):
    """End the core: requests still open are aborted. The core answers with the same message, its last."""


class Reply(msgspec.Struct, array_like=True, tag="reply"):
    """The answer to a Call: a result of plain types, or an error text."""

    call_id: int
    result: Any = None
    error: str = ""


class Ready(msgspec.Struct, array_like=True, tag="ready"):
    """The core has loaded the model and planned its cache."""

    plan: CachePlan
    max_model_len: int


class Failed(msgspec.Struct, array_like=True, tag="failed"):
    """The core cannot start or cannot go on; nothing follows."""

    error: str
    is_config_error: bool = False
    """True when the user can mend it (options, model files)."""


CoreMessage = Start | EngineRequest | Abort | Call | Shutdown
FrontMessage = EngineOutputs | Reply | Ready | Failed | Shutdown
