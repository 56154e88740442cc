"""One rank's process runs `python -m octavo.runtime.worker.main MAILBOX RANK WORKER PARENT`.

Started by the engine's multiprocess executor. Reads commands, gives them to the Worker, answers; keeps no
state of its own. Ends on Shutdown, with its parent, and after any fault that leaves the worker's state
unsure. Nothing heavy is imported before the guard against the parent's death stands.
"""

import os
import signal
import sys
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo.base import log
from octavo.base.bytecode import kept_bytecode
from octavo.base.devices import number_of
from octavo.base.errors import ConfigError, OctavoError, Unsupported
from octavo.base.processes import die_with_parent, end_with_threads, tell_stacks_when_asked
from octavo.base.registry import load_object, load_plugins
from octavo.base.transport import Mailbox, Receiver, Sender
from octavo.config.engine import EngineConfig
from octavo.messages.control import Call, Failed, Shutdown, Start, kind_of
from octavo.messages.kv import CachePlan
from octavo.messages.step import SchedulerOutput, TokenMasks
from octavo.messages.worker import (
    REPLY_PIPE,
    Alive,
    Beat,
    Loaded,
    Returned,
    WorkerCommand,
    WorkerReply,
    rank_pipe,
)
from octavo.runtime import late_modules

logger = log.get_logger("octavo.runtime.worker.main")  # __name__ is __main__ here

_MOST_OPEN = 2


class Rank:
    """Runs one worker behind its two pipes."""

    def __init__(self, mailbox: Mailbox, rank: int, worker_class: str) -> None:
        self._rank = rank
        self._worker_class = worker_class
        self._worker: Any = None
        self._answers = False
        """Whether the results of steps come from here."""
        self._idle: Any = None
        """What the worker does while there are no commands; see Lockstep.idle."""
        self._pending: Any = None
        """The step given last."""
        self._open: deque[Any] = deque()
        """Steps whose results have not been read."""
        self._rendezvous = f"file://{mailbox.path / 'rendezvous'}"
        self._commands: Receiver[WorkerCommand] = Receiver(mailbox.address(rank_pipe(rank)), WorkerCommand)
        self._replies: Sender[WorkerReply] = Sender(mailbox.address(REPLY_PIPE))

    def run(self) -> int:
        """Work until Shutdown (exit code 0) or a fault (1), which is reported before."""
        try:
            while not isinstance(command := self._next(), Shutdown):
                if command is not None:
                    self._obey(command)
        except Exception as error:
            logger.exception("The rank ends.")
            self._replies.send(_failure(self._rank, error))
            return 1
        finally:
            self._idle = None
            if self._worker is not None:
                self._worker.close()
            self._replies.close()
            self._commands.close()
        return 0

    def _next(self) -> WorkerCommand | None:
        """Return the next command; until there is one, answer for steps in their order, as they are done.

        So the device is given the next step before the last is over. More are not sent until one is answered.
        """
        while self._open:
            is_full = len(self._open) >= _MOST_OPEN
            if not is_full and (command := self._commands.receive(0.0)) is not None:
                return command
            if is_full or self._open[0].is_ready:
                output = self._open.popleft().read()
                if self._answers:
                    self._replies.send(output)
        return self._commands.receive(self._idle and self._idle(self._commands.interrupt))

    def _obey(self, command: WorkerCommand) -> None:
        match command:
            case Start(config, _, rendezvous):
                self._rendezvous = rendezvous or self._rendezvous
                with kept_bytecode():
                    self._worker = self._make_worker(EngineConfig.from_msgpack(config))
                    self._replies.send(Loaded(self._rank, self._worker.load()))
            case CachePlan():
                self._worker.allocate(command)
                self._idle = getattr(self._worker, "idle", None)
                self._replies.send(Returned(self._rank))
            case SchedulerOutput():
                self._pending = self._worker.execute(command)
                if not command.masks_follow:
                    self._open.append(self._pending)
            case TokenMasks():
                self._worker.sample(command)
                self._open.append(self._pending)
            case Beat():
                self._replies.send(Alive(self._rank))
            case Call(_, verb, arguments):
                self._call(verb, arguments)

    def _make_worker(self, config: EngineConfig) -> Any:
        load_plugins()
        parallel = config.parallel
        self._answers = self._rank == parallel.output_rank
        number = number_of(parallel.device) + parallel.node_ranks.index(self._rank)
        config = replace(config, parallel=parallel.on_device(number))
        late_modules.import_torch(config.parallel.device)
        return load_object(self._worker_class)(config, self._rank, self._rendezvous)

    def _call(self, verb: str, arguments: dict[str, Any]) -> None:
        """Answer with the result, or with why there is none (or none that can be sent)."""
        try:
            self._replies.send(Returned(self._rank, self._worker.call(verb, arguments)))
        except Exception as error:
            logger.warning("%s failed.", verb, exc_info=True)
            text = str(error) if isinstance(error, OctavoError) else f"{type(error).__name__}: {error}"
            self._replies.send(Returned(self._rank, error=text, kind=kind_of(error)))


def _failure(rank: int, error: Exception) -> Failed:
    if isinstance(error, ConfigError | Unsupported):
        return Failed.because_of(error)
    return Failed(f"rank {rank}: {type(error).__name__}: {error}")


def _end_at_once(error: Exception) -> None:
    """End the process, on a thread that failed, so that the engine sees it."""
    logger.error("A thread of the rank failed.", exc_info=error)
    os._exit(1)


def main(arguments: list[str]) -> int:
    """Guard, then work. Returns the exit code."""
    path, rank, worker_class, parent = arguments
    mailbox = Mailbox(Path(path))
    die_with_parent(int(parent), mailbox.close)
    # Ctrl-C and a service manager signal every process at once: the end is for the engine to say.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    log.setup(f"worker{rank}")
    tell_stacks_when_asked()
    end_with_threads(_end_at_once)
    return Rank(mailbox, int(rank), worker_class).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
