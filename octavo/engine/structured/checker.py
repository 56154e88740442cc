"""A checker: `python -m octavo.engine.structured.checker MAILBOX VOCABULARY BACKEND PARENT`.

`frontend/requests/grammar_check` starts it, and kills it when it takes too long. It translates and compiles
what users bring, one grammar after the other, under a limit of memory; a grammar that breaks the process
breaks nothing else. Keeps nothing.
"""

import signal
import sys
from pathlib import Path
from typing import Any

import msgspec

from octavo.base import log
from octavo.base.errors import RequestError
from octavo.base.limits import limit_memory
from octavo.base.processes import die_with_parent
from octavo.base.registry import load_plugins
from octavo.base.transport import Mailbox, Receiver, Sender
from octavo.engine.structured import BACKENDS
from octavo.engine.structured.interface import Backend
from octavo.messages import structured

logger = log.get_logger(__name__)
_MEMORY_BYTES = 1 << 30
"""On top of what the process has when it is ready."""


def judge(backend: Backend[Any], check: structured.Check) -> structured.Verdict:
    """Compile one grammar."""
    try:
        grammar = backend.translate(check.params)
        backend.compile(grammar)
    except RequestError as error:
        return structured.Verdict(error=str(error))
    except (MemoryError, RecursionError) as error:
        return structured.Verdict(error=f"The grammar is too large: {type(error).__name__}.")
    return structured.Verdict(grammar)


def main(arguments: list[str]) -> int:
    """Serve until the parent ends this process."""
    path, vocabulary, backend_name, parent = arguments
    mailbox = Mailbox(Path(path))
    die_with_parent(int(parent), mailbox.close)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log.setup("checker")
    load_plugins()
    content = msgspec.msgpack.decode(Path(vocabulary).read_bytes(), type=structured.Vocabulary)
    backend = BACKENDS.load(backend_name)(content)
    checks: Receiver[structured.Check] = Receiver(mailbox.address(structured.CHECK_PIPE), structured.Check)
    answers: Sender[structured.CheckerAnswer] = Sender(mailbox.address(structured.VERDICT_PIPE))
    limit_memory(_MEMORY_BYTES, further=True)
    answers.send(structured.CheckerReady())
    while True:
        check = checks.receive()
        if check is not None:
            signal.setitimer(signal.ITIMER_PROF, check.limit_s)  # ends a process that computes for longer
            verdict = judge(backend, check)
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            answers.send(verdict)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
