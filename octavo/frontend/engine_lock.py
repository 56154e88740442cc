"""`EngineLock`: one thread at a time uses an engine, and Ctrl-C waits until what it does there is complete.

Taken by LLM and SteppedCore. A KeyboardInterrupt in the middle of a step would leave the scheduler with a
plan that nobody answers; so would two threads in one step.
"""

import signal
import threading
from collections import deque
from types import FrameType, TracebackType
from typing import Any


class EngineLock:
    """A reentrant lock that threads get in the order in which they asked, so that none of them starves.

    While the main thread has it or waits for it, the first SIGINT is kept, and raised when the lock is given
    back. A second one is raised at once: the thread may be waiting for something that never comes.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        """Of the next three."""
        self._owner: int | None = None
        self._depth = 0
        self._waiting: deque[threading.Event] = deque()
        self._handler: Any = None
        """The handler of SIGINT that is replaced meanwhile."""
        self._is_interrupted = False

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._owner == me:
            self._depth += 1
            return
        self._hold_interrupts()
        turn = threading.Event()
        try:
            with self._guard:
                if self._owner is not None:
                    self._waiting.append(turn)
                else:
                    self._owner = me
                    turn.set()
            turn.wait()
            self._owner, self._depth = me, 1
        except BaseException:  # a second interrupt
            self._leave(turn)
            self._let_interrupt()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._hand_on()
            self._let_interrupt()

    @property
    def is_wanted(self) -> bool:
        """Return True if another thread waits for it, or an interrupt."""
        return bool(self._waiting) or self._is_interrupted

    def _leave(self, turn: threading.Event) -> None:
        """Wait no longer; the turn may have come in the meantime."""
        with self._guard:
            if turn in self._waiting:
                self._waiting.remove(turn)
                return
        if turn.is_set():
            self._hand_on()

    def _hand_on(self) -> None:
        with self._guard:
            if self._waiting:
                self._owner = -1  # until the next thread says that it has it
                self._waiting.popleft().set()
            else:
                self._owner = None

    def _hold_interrupts(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # signals come to the main thread alone
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler):
            self._handler, self._is_interrupted = handler, False
            signal.signal(signal.SIGINT, self._note_interrupt)

    def _note_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._is_interrupted:
            self._handler(number, frame)
        self._is_interrupted = True

    def _let_interrupt(self) -> None:
        if self._handler is None or threading.current_thread() is not threading.main_thread():
            return
        handler, self._handler = self._handler, None
        signal.signal(signal.SIGINT, handler)
        if self._is_interrupted:
            self._is_interrupted = False
            signal.raise_signal(signal.SIGINT)
