"""The process of the engine core: `python -m octavo.engine.process MAILBOX LIFE PARENT`.

Started by the front's client. The main thread owns the core: it takes what has arrived, runs a step, sends
what the step brought, and sleeps when there is nothing to do, waking up to show that it lives. A second
thread reads and decodes the fronts' messages, so that decoding overlaps a step; it stops reading when the
main thread falls far behind. Whatever goes wrong in any thread ends the process: Failed with the cause, exit
code 1.
"""

import gc
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType

from octavo.base import faults, log
from octavo.base.errors import ConfigError, EngineDead, OctavoError
from octavo.base.processes import die_with_parent, end_with_threads, tell_stacks_when_asked
from octavo.base.registry import load_plugins
from octavo.base.transport import BadFrame, Mailbox, Receiver
from octavo.config.engine import EngineConfig
from octavo.engine.core import EngineCore
from octavo.engine.executor import WORKER, make_executor
from octavo.engine.executor.inproc import load_worker
from octavo.engine.fronts import BEAT_S, Fronts
from octavo.engine.preparation import Preparation
from octavo.messages import control
from octavo.messages.request import EngineRequest

logger = log.get_logger("octavo.engine.process")  # __name__ is __main__ here
_MAX_INBOX = 10_000
"""Messages decoded and not yet obeyed; more stay in the pipe, whose senders learn that it is full."""


class CoreProcess:
    """An EngineCore between the pipes of its fronts."""

    def __init__(self, mailbox: Mailbox, life: int = 1) -> None:
        """life: the number of this core among those of its parent."""
        self._life = life
        self._incoming: Receiver[control.CoreMessage] = Receiver(
            mailbox.address(control.core_pipe(life)), control.CoreMessage
        )
        self._fronts = Fronts(mailbox, life)
        self._inbox: SimpleQueue[control.CoreMessage | Exception] = SimpleQueue()
        self._room = threading.Semaphore(_MAX_INBOX)
        """For messages of the reader."""
        self._num_bad_frames = 0
        self._reader = threading.Thread(target=self._read, name="core-inbox", daemon=True)
        self._core: EngineCore | None = None
        self._take_in: Callable[[control.CoreMessage], None] = self._deliver
        self._is_loading = True

    def run(self) -> int:
        """Serve until Shutdown (exit code 0) or a fault (1), whose cause is sent before all else ends."""
        self._reader.start()
        try:
            core = self._start()
            self._serve(core)
            self._fronts.abort_all()
            self._fronts.tell(0, control.Shutdown())
        except Exception as error:
            if not isinstance(error, ConfigError):  # the front says what the user can mend
                logger.exception("The engine core ends.")
            self._fronts.tell(0, control.Failed.because_of(error))
            return 1
        finally:
            self._close()
        return 0

    def ask_to_end(self, signal_number: int, frame: FrameType | None) -> None:
        """Handler of SIGTERM: the same as Shutdown; at once while the model still loads."""
        if self._is_loading:
            raise SystemExit(0)
        self._inbox.put(control.Shutdown())

    def fail(self, error: Exception) -> None:
        """End the engine, which cannot go on; from any thread."""
        self._inbox.put(error)

    def _start(self) -> EngineCore:
        start = self._take()
        if not isinstance(start, control.Start):
            raise OctavoError(f"The first message must be Start, not {type(start).__name__}.")
        self._fronts.admit(start.num_fronts)
        config = EngineConfig.from_msgpack(start.config)
        load_plugins()
        executor = make_executor(config)
        executor.watch(self.fail)
        self._core = EngineCore(config, executor)
        plan = self._core.start()
        self._take_in = Preparation(self._core, self._deliver).take
        gc.collect()
        gc.freeze()  # what stays as long as the engine need not be looked through again and again
        self._fronts.greet(control.Ready(plan, plan.max_model_len, self._life))
        self._is_loading = False
        return self._core

    def _serve(self, core: EngineCore) -> None:
        """Take what has arrived, then step, if only to show that the loop runs. Returns on Shutdown."""
        while True:
            while (wait_s := core.wait_s()) or not self._inbox.empty():
                has_more = self._inbox.empty() and core.use_pause()
                message = self._take(0.0 if has_more else min(wait_s, BEAT_S))
                if message is None:
                    break
                if isinstance(message, control.Shutdown):
                    return
                self._obey(core, message)
            outputs = core.step()
            outputs.stats.num_dropped += self._num_bad_frames
            self._fronts.deliver(outputs)
            core.abort(self._fronts.take_orphans())

    def _obey(self, core: EngineCore, message: control.CoreMessage) -> None:
        match message:
            case EngineRequest():
                self._fronts.own(message)
                core.add(message)
            case control.Abort(request_ids):
                core.abort(request_ids)
                self._fronts.disown(request_ids)
            case control.Call():
                self._call(core, message)
            case control.Detach(front):
                self._fronts.detach(front)
                core.abort(self._fronts.take_orphans())
            case control.EndRequests(front):
                self._fronts.pass_on(message, front)
            case _:
                logger.warning("Dropped a message %s: out of place.", type(message).__name__)

    def _call(self, core: EngineCore, call: control.Call) -> None:
        """Answer with the result, or with why there is none (or none that can be sent)."""
        try:
            self._fronts.tell(call.front, control.Reply(call.call_id, core.call(call.verb, call.arguments)))
        except EngineDead:
            raise
        except Exception as error:
            logger.warning("The command %s failed.", call.verb, exc_info=True)
            reply = control.Reply(call.call_id, None, f"{call.verb}: {error}", control.kind_of(error))
            self._fronts.tell(call.front, reply)

    def _take(self, timeout_s: float | None = None) -> control.CoreMessage | None:
        """Wait for the next message; None after `timeout_s`. Raises what another thread raised."""
        try:
            message = self._inbox.get(timeout=timeout_s)
        except Empty:
            return None
        self._room.release()
        if isinstance(message, Exception):
            raise message
        return message

    def _read(self) -> None:
        """Thread: every message of the fronts, until interrupted. Its failure is the core's."""
        try:
            while True:
                try:
                    message = self._incoming.receive()
                except BadFrame as error:
                    self._num_bad_frames += 1
                    logger.warning("Dropped frame number %d: %s", self._num_bad_frames, error)
                    continue
                if message is None:
                    return
                if isinstance(message, EngineRequest):
                    faults.hit("core.decode_add")
                self._take_in(message)
        except Exception as error:
            self.fail(error)

    def _deliver(self, message: control.CoreMessage) -> None:
        self._room.acquire()
        self._inbox.put(message)

    def _close(self) -> None:
        self._is_loading = False
        if self._core is not None:
            self._core.close()
        self._incoming.interrupt()
        self._room.release()  # the reader may wait for it
        self._reader.join()
        self._incoming.close()
        self._fronts.close()


def _late_arguments() -> list[str]:
    """In a process started ahead: import what a worker takes, then wait. Ends with the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    load_worker(WORKER, "cpu")
    return sys.stdin.read().split("\0")


def main(arguments: list[str]) -> int:
    """Guard against the parent's death, then serve. Returns the exit code."""
    if len(arguments) < 3:  # there is no parent any more
        return 0
    path, life, parent = arguments
    mailbox = Mailbox(Path(path))
    die_with_parent(int(parent), mailbox.close)
    log.setup("engine0")
    log.go_to_background()
    tell_stacks_when_asked()
    process = CoreProcess(mailbox, int(life))
    end_with_threads(process.fail)
    # Ctrl-C reaches every process of the terminal: the front decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, process.ask_to_end)
    return process.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or _late_arguments()))
