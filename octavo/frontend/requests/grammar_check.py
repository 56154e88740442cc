"""`GrammarCheck`: can a grammar be compiled in reasonable time and memory? Asked before a request is sent.

Used by the input processor. Grammars are compiled by processes that may be killed
(octavo.engine.structured.checker), so a hostile one costs its sender an error and nobody else anything: the
core compiles again, off its loop, only what a checker compiled in time. Verdicts are remembered, those on
hostile grammars too. At most MAX_CHECKERS processes run, MAX_LARGE of them on large grammars; they are
started when they are needed.
"""

import signal
import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial

import msgspec

from octavo.base.errors import OctavoError, RequestError
from octavo.base.log import get_logger
from octavo.base.lru import LRU
from octavo.base.processes import Child
from octavo.base.transport import Mailbox, Receiver, Sender
from octavo.frontend.requests.check_queue import CheckQueue, Job
from octavo.frontend.requests.vocabulary_file import VocabularyFile
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.messages import structured

logger = get_logger(__name__)

MAX_CHECKERS = 3
MAX_LARGE = 2
TIME_LIMIT_S = 5.0
BACKEND = "guidance"
_MODULE = "octavo.engine.structured.checker"
_PATIENCE = 12
"""Times the limit that is waited on a busy machine, where a checker does not get a processor's time."""
_START_LIMIT_S = 300.0
_MAX_REMEMBERED_BYTES = 16 << 20
_NAME = "structured_outputs"


class Checker:
    """One process. Used by one thread at a time; after an error it is dead."""

    def __init__(self, vocabulary: str, backend: str) -> None:
        """Start it and wait until it listens. Raises OctavoError."""
        opened = ExitStack()
        self.close = opened.close
        """End the process; nothing of it is left."""
        mailbox = Mailbox.create()
        opened.callback(mailbox.close)
        self._answers: Receiver[structured.CheckerAnswer] = Receiver(
            mailbox.address(structured.VERDICT_PIPE), structured.CheckerAnswer
        )
        opened.callback(self._answers.close)
        self._checks: Sender[structured.Check] = Sender(mailbox.address(structured.CHECK_PIPE))
        opened.callback(self._checks.close, linger_s=0.0)
        self._exit_code: int | None = None
        child = Child(_MODULE, str(mailbox.path), vocabulary, backend, on_exit=self._notice_exit)
        opened.callback(child.end, grace_s=0.0)
        if not isinstance(self._answers.receive(_START_LIMIT_S), structured.CheckerReady):
            self.close()
            raise OctavoError("The process that checks grammars does not start; its log says why.")

    @property
    def is_alive(self) -> bool:
        """False when the process has ended."""
        return self._exit_code is None

    def judge(self, params: structured.StructuredOutputsParams) -> structured.Verdict | None:
        """None when it took too long or the process ended: it is dead then."""
        self._checks.send(structured.Check(params, TIME_LIMIT_S))
        answer = self._answers.receive(_PATIENCE * TIME_LIMIT_S)
        if isinstance(answer, structured.Verdict):
            return answer
        is_late = self._exit_code in (None, -signal.SIGPROF)
        cause = "ran out of time" if is_late else f"ended with exit code {self._exit_code}"
        logger.warning("A grammar was refused: its checker %s.", cause)
        self.close()
        return None

    def _notice_exit(self, code: int) -> None:
        """On the thread that waits for the process."""
        self._exit_code = code
        self._answers.interrupt()


class GrammarCheck:
    """All verdicts of one front. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, end_ids: list[int]) -> None:
        """vocab_size: number of logits; end_ids: tokens that end a text."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = end_ids
        self._vocabulary: list[VocabularyFile] = []
        """None before the first grammar."""
        self._lock = threading.RLock()
        self._idle: list[Checker] = []
        self._queue = CheckQueue()
        self._num_large = 0
        """Large grammars that are being checked."""
        self._threads = ThreadPoolExecutor(MAX_CHECKERS, "grammar-check")
        self._verdicts: LRU[bytes, structured.Verdict] = LRU(_MAX_REMEMBERED_BYTES)
        self._asked: dict[bytes, Future[structured.Verdict]] = {}
        """Verdicts to come; who asks the same meanwhile waits for the same answer."""
        self.close = weakref.finalize(self, _close, self._threads, self._queue, self._idle, self._vocabulary)
        """End the checkers; may be called twice."""

    def check(self, params: structured.StructuredOutputsParams) -> structured.Constraint:
        """What goes to the core. Waits for a checker. Raises RequestError."""
        verdict = self.ask(params).result()
        if verdict.error:
            raise RequestError(verdict.error, _NAME)
        return structured.Constraint(verdict.grammar, str(self._vocabulary[0].path), BACKEND)

    def ask(
        self, params: structured.StructuredOutputsParams, tenant: str = ""
    ) -> "Future[structured.Verdict]":
        """The verdict, when it is there; then `check` does not wait. Raises RequestError, Overloaded.

        tenant: who asks; tenants take turns
        """
        if self._tokenizer is None:
            raise RequestError(
                "Structured outputs requires a tokenizer so it can't be used with 'skip_tokenizer_init'.",
                _NAME,
            )
        try:
            key = msgspec.msgpack.encode(params, order="deterministic")
        except (TypeError, ValueError, OverflowError) as error:
            raise RequestError(
                "structured_outputs must hold plain values, and integers of 64 bits at most.", _NAME
            ) from error
        with self._lock:
            known = self._verdicts.get(key)
            if known is not None:
                future: Future[structured.Verdict] = Future()
                future.set_result(known)
            elif (asked := self._asked.get(key)) is not None:
                future = asked
            else:
                job = Job(params, len(key))
                self._queue.put(tenant, job)
                future = self._asked[key] = job.future
                future.add_done_callback(partial(self._remember, key))
                self._threads.submit(self._serve)
        return future

    def _serve(self) -> None:
        """Check one grammar, if there is one that may be checked now. On a thread of the pool."""
        with self._lock:
            job = self._queue.take(allows_large=self._num_large < MAX_LARGE)
            if job is None:
                return
            self._num_large += job.is_large
        try:
            job.future.set_result(self._judge(job))
        except BaseException as error:
            job.future.set_exception(error)
        finally:
            with self._lock:
                self._num_large -= job.is_large
            with suppress(RuntimeError):  # there is no next one after the end
                self._threads.submit(self._serve)

    def _judge(self, job: Job) -> structured.Verdict:
        assert self._tokenizer is not None
        checker = self._take_checker(self._tokenizer, num_left=int(job.is_large))
        try:
            verdict = checker.judge(job.params)
        except BaseException:
            checker.close()
            raise
        if verdict is not None:
            if len(self._idle) < MAX_CHECKERS:
                self._idle.append(checker)
            else:
                checker.close()
            return verdict
        return structured.Verdict(
            error=f"structured_outputs.{job.params.kind} is too complex: compiling it takes more than "
            f"{TIME_LIMIT_S:g} s or more memory than is allowed. Simplify it: fewer alternatives, shorter "
            "repetitions, less nesting."
        )

    def _take_checker(self, tokenizer: Tokenizer, num_left: int = 0) -> Checker:
        """One that is idle, if as many are left (for small grammars, which shall not wait), or a new one."""
        with self._lock:
            if not self._vocabulary:
                self._vocabulary.append(VocabularyFile(tokenizer, self._vocab_size, self._end_ids))
            while len(self._idle) > num_left:
                if (checker := self._idle.pop()).is_alive:
                    return checker
                checker.close()
        return Checker(str(self._vocabulary[0].path), BACKEND)

    def _remember(self, key: bytes, future: "Future[structured.Verdict]") -> None:
        """A failure of ours is no verdict."""
        with self._lock:
            del self._asked[key]
            if not future.cancelled() and future.exception() is None:
                verdict = future.result()
                self._verdicts.put(key, verdict, len(key) + len(verdict.grammar) + len(verdict.error))


def _close(
    threads: ThreadPoolExecutor, queue: CheckQueue, idle: list[Checker], vocabulary: list[VocabularyFile]
) -> None:
    queue.close()
    threads.shutdown(cancel_futures=True)
    while idle:
        idle.pop().close()
    while vocabulary:
        vocabulary.pop().close()
