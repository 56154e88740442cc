"""The process of the engine core: `python -m octavo.engine.process MAILBOX PARENT`.

Started by the front's client. The main thread owns the core: it takes what has arrived, runs a step, sends
what the step brought, and sleeps when there is nothing to do. A second thread reads and decodes the front's
messages, so that decoding overlaps a step. Whatever goes wrong in either ends the process: Failed with the
cause, exit code 1.
"""

import signal
import sys
import threading
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType

from octavo.base import log
from octavo.base.errors import ConfigError, EngineDead, OctavoError, Unsupported
from octavo.base.processes import die_with_parent
from octavo.base.registry import load_plugins
from octavo.base.transport import BadFrame, Mailbox, Receiver, Sender
from octavo.config.engine import EngineConfig
from octavo.engine.core import EngineCore
from octavo.engine.executor import make_executor
from octavo.messages.control import (
    CORE_PIPE,
    FRONT_PIPE,
    Abort,
    Call,
    CoreMessage,
    Failed,
    FrontMessage,
    Ready,
    Reply,
    Shutdown,
    Start,
)
from octavo.messages.request import EngineOutput, EngineOutputs, EngineRequest, FinishReason, SchedulerStats

logger = log.get_logger(__name__)


class CoreProcess:
    """An EngineCore between two pipes."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._incoming: Receiver[CoreMessage] = Receiver(mailbox.address(CORE_PIPE), CoreMessage)
        self._outgoing: Sender[FrontMessage] = Sender(mailbox.address(FRONT_PIPE))
        self._inbox: SimpleQueue[CoreMessage | Exception] = SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="core-inbox", daemon=True)
        self._core: EngineCore | None = None
        self._open_ids: set[str] = set()
        self._is_loading = True

    def run(self) -> int:
        """Serve until Shutdown (exit code 0) or a fault (1), whose cause is sent before all else ends."""
        self._reader.start()
        try:
            core = self._start()
            self._serve(core)
            self._abort_all()
        except Exception as error:
            logger.exception("The engine core ends.")
            self._outgoing.send(_failure(error))
            return 1
        finally:
            self._close()
        return 0

    def ask_to_end(self, signal_number: int, frame: FrameType | None) -> None:
        """Handler of SIGTERM: the same as Shutdown; at once while the model still loads."""
        if self._is_loading:
            raise SystemExit(0)
        self._inbox.put(Shutdown())

    def _start(self) -> EngineCore:
        start = self._take()
        if not isinstance(start, Start):
            raise OctavoError(f"The first message must be Start, not {type(start).__name__}.")
        config = EngineConfig.from_msgpack(start.config)
        load_plugins()
        executor = make_executor(config)
        executor.watch(self._inbox.put)
        self._core = EngineCore(config, executor)
        plan = self._core.start()
        self._outgoing.send(Ready(plan, plan.max_model_len))
        self._is_loading = False
        return self._core

    def _serve(self, core: EngineCore) -> None:
        """The loop: what has arrived, then a step. Returns on Shutdown."""
        while True:
            while not self._inbox.empty() or not core.has_work():
                message = self._take(core.wait_s())  # waits when there is nothing to compute
                if message is None:
                    break
                if isinstance(message, Shutdown):
                    return
                self._obey(core, message)
            outputs = core.step()
            self._open_ids.difference_update(o.request_id for o in outputs.outputs if o.finish_reason)
            self._outgoing.send(outputs)

    def _obey(self, core: EngineCore, message: CoreMessage) -> None:
        match message:
            case EngineRequest():
                core.add(message)
                self._open_ids.add(message.request_id)
            case Abort(request_ids):
                core.abort(request_ids)
                self._open_ids.difference_update(request_ids)
            case Call():
                self._call(core, message)
            case _:
                logger.warning("Dropped a message %s: out of place.", type(message).__name__)

    def _call(self, core: EngineCore, call: Call) -> None:
        """Answer with the result, or with why there is none (or none that can be sent)."""
        try:
            self._outgoing.send(Reply(call.call_id, core.call(call.verb, call.arguments)))
        except EngineDead:
            raise
        except Exception as error:
            logger.warning("The command %s failed.", call.verb, exc_info=True)
            self._outgoing.send(Reply(call.call_id, error=f"{call.verb}: {error}"))

    def _abort_all(self) -> None:
        """Every request ends exactly once, also when the engine ends."""
        outputs = [EngineOutput(i, [], finish_reason=FinishReason.ABORT) for i in sorted(self._open_ids)]
        self._outgoing.send(EngineOutputs(outputs, SchedulerStats()))
        self._outgoing.send(Shutdown())

    def _take(self, timeout_s: float | None = None) -> CoreMessage | None:
        """The next message, when it comes; None after `timeout_s`. Raises what the reader raised."""
        try:
            message = self._inbox.get(timeout=timeout_s)
        except Empty:
            return None
        if isinstance(message, Exception):
            raise message
        return message

    def _read(self) -> None:
        """Thread: every message of the front, until interrupted. Its failure is the core's."""
        num_dropped = 0
        try:
            while True:
                try:
                    message = self._incoming.receive()
                except BadFrame as error:
                    num_dropped += 1
                    logger.warning("Dropped frame number %d: %s", num_dropped, error)
                    continue
                if message is None:
                    return
                self._inbox.put(message)
        except Exception as error:
            self._inbox.put(error)

    def _close(self) -> None:
        self._is_loading = False
        if self._core is not None:
            self._core.close()
        self._incoming.interrupt()
        self._reader.join()
        self._incoming.close()
        self._outgoing.close()


def _failure(error: Exception) -> Failed:
    """What the front is told: octavo's own texts as they are, others with their type."""
    if isinstance(error, OctavoError):
        return Failed(str(error), is_config_error=isinstance(error, ConfigError | Unsupported))
    return Failed(f"{type(error).__name__}: {error}")


def main(arguments: list[str]) -> int:
    """Guard against the parent's death, then serve. Returns the exit code."""
    path, parent = arguments
    mailbox = Mailbox(Path(path))
    die_with_parent(int(parent), mailbox.close)
    log.setup("engine0")
    process = CoreProcess(mailbox)
    # Ctrl-C reaches every process of the terminal: the front decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, process.ask_to_end)
    return process.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
