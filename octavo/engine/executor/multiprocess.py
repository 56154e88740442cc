"""One process per rank: a step is encoded once and written to every rank's pipe, one rank answers.

Ranks on other machines (`Nodes`) hear the same and answer through the same pipe.
The core calls it from one thread. A second thread reads the answers and completes the steps in order; one
thread per rank waits for its process to end. The first fault, a message Failed or a dead process, ends
everything: all open steps and every later call raise it.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from octavo.base import env
from octavo.base.errors import ConfigError, EngineDead, OctavoError
from octavo.base.processes import Child
from octavo.base.transport import Broadcaster, Mailbox, Receiver
from octavo.config.engine import EngineConfig
from octavo.engine.executor import WORKER
from octavo.engine.executor.interface import Executor
from octavo.engine.executor.nodes import Nodes, network_defaults
from octavo.messages.control import TOGETHER, Call, Failed, Shutdown, Start, refusal
from octavo.messages.kv import CachePlan, ModelReady
from octavo.messages.step import ModelRunnerOutput, SchedulerOutput, TokenMasks
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

_RANK_MODULE = "octavo.runtime.worker.main"
NETWORK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
"""torch.distributed opens sockets: never on an outer interface, unless the user chose one. Sums have the same
order at all sizes, which those of switches (NVLink multicast) have not.
"""
LAST_WORDS_S = 0.2
GRACE_S = 5.0
_BEAT_S = 2.0
"""Between questions to idle ranks whether they are there."""
_SILENCE_S = 10.0
"""Without an answer they are not: stopped, or hanging."""
_NOT_HERE = (
    "This is node {0.node_rank} of {0.nnodes}: the engine runs on node 0. "
    "Start this one by octavo serve --headless."
)
A = TypeVar("A", Loaded, Returned)


def start_rank(
    mailbox: Mailbox, rank: int, worker: str, on_exit: Callable[[int], None], environment: Mapping[str, str]
) -> Child:
    """Start the process of a rank, which takes its commands from this mailbox."""
    return Child(_RANK_MODULE, str(mailbox.path), str(rank), worker, on_exit=on_exit, environment=environment)


class MultiprocessExecutor(Executor):
    """Runs the class named `worker` in a process per rank."""

    def __init__(self, worker: str = WORKER) -> None:
        self._worker_class = worker
        self._key = env.node_key()
        self._children: list[Child] = []
        self._opened = ExitStack()
        self._serving = False
        self._num_ranks, self._patience_s = 0, 0.0
        self._lock = threading.Lock()
        """Guards the two below, which the reader and the watchers share with the core's thread."""
        self._open_steps: deque[Future[ModelRunnerOutput]] = deque()
        self._error: OctavoError | None = None
        self._asked_s = 0.0
        """When the ranks were last asked; those that have not answered are `_silent`."""
        self._silent: set[int] = set()
        self._answers: SimpleQueue[Loaded | Returned | OctavoError] = SimpleQueue()
        self._cause_is_known = threading.Event()
        self._on_loss: Callable[[Exception], None] = lambda _: None

    def watch(self, on_loss: Callable[[Exception], None]) -> None:
        self._on_loss = on_loss

    def start(self, config: EngineConfig) -> ModelReady:
        """Start the ranks and load the model. After ConfigError or EngineDead nothing is left running."""
        parallel, ranks = config.parallel, config.parallel.node_ranks
        if parallel.node_rank:
            raise ConfigError(_NOT_HERE.format(parallel))
        self._num_ranks = parallel.world_size
        self._patience_s = _SILENCE_S + (parallel.node_timeout if parallel.nnodes > 1 else 0.0)
        with ExitStack() as opened:
            mailbox = Mailbox.create()
            opened.callback(mailbox.close)
            self._replies: Receiver[WorkerReply] = Receiver(mailbox.address(REPLY_PIPE), WorkerReply)
            opened.callback(self._replies.close)
            addresses = [mailbox.address(rank_pipe(rank)) for rank in ranks]
            environment, rendezvous = NETWORK, ""
            if parallel.nnodes > 1:
                nodes = Nodes(config, mailbox, self._lose, self._key)
                opened.callback(nodes.close)
                nodes.wait(lambda: self._error)
                addresses += nodes.pipes
                environment = {**NETWORK, **network_defaults(nodes.place)}
                rendezvous = nodes.rendezvous
            self._commands: Broadcaster[WorkerCommand] = Broadcaster(addresses)
            opened.callback(self._commands.close, linger_s=0.0)
            reader = threading.Thread(target=self._read, name="executor-replies", daemon=True)
            reader.start()
            opened.callback(reader.join)
            opened.callback(self._replies.interrupt)
            opened.callback(self._end_children)
            for rank in ranks:
                lost = partial(self._on_exit, rank)
                self._children.append(start_rank(mailbox, rank, self._worker_class, lost, environment))
            self._commands.send(Start(config.to_msgpack(), rendezvous=rendezvous))
            loaded = self._gather(Loaded)
            self._opened = opened.pop_all()
        self._serving = True
        return ModelReady.of_all([answer.ready for answer in loaded])

    def allocate(self, plan: CachePlan) -> None:
        self._commands.send(plan)
        self._gather(Returned)

    def execute(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]:
        future: Future[ModelRunnerOutput] = Future()
        with self._lock:
            if self._error is not None:
                future.set_exception(self._error)
                return future
            self._open_steps.append(future)
        self._commands.send(step)
        return future

    def sample(self, masks: TokenMasks) -> None:
        self._commands.send(masks)

    def call(self, verb: str, arguments: dict[str, Any]) -> list[Any]:
        """Run the workers' command `verb`: one result per rank.

        Raises what ranks refuse it with, as one rank would; EngineDead where others did it and would go on
        with something else than those.
        """
        self._commands.send(Call(0, verb, arguments))
        answers = self._gather(Returned)
        refused = [answer for answer in answers if answer.error]
        if not refused:
            return [answer.result for answer in answers]
        are_alike = len(refused) == len(answers) and len({answer.error for answer in refused}) == 1
        text = refused[0].error if are_alike else "; ".join(f"rank {a.rank}: {a.error}" for a in refused)
        if verb in TOGETHER and len(refused) < len(answers):
            self._lose(error := EngineDead(f"Ranks differ after {verb}: {text}"))
            raise error
        kinds = {answer.kind for answer in refused}
        raise refusal(text, kinds.pop() if len(kinds) == 1 else "")

    def beat(self) -> None:
        """Ask idle ranks whether they are there; who does not answer in time is lost."""
        now = time.monotonic()
        if not self._silent:
            if now - self._asked_s > _BEAT_S:
                self._asked_s, self._silent = now, set(range(self._num_ranks))
                self._commands.send(Beat())
        elif now - self._asked_s > self._patience_s:
            ranks = ", ".join(map(str, sorted(self._silent)))
            self._lose(EngineDead(f"Rank {ranks} has not answered for {self._patience_s:g} s while idle."))

    def close(self) -> None:
        """End the ranks, killing those that do not end by themselves."""
        self._opened.close()

    def _end_children(self) -> None:
        # ranks that still load do not listen, and after a fault they may wait for each other
        is_sound = self._error is None
        grace_s = GRACE_S if self._serving and is_sound else 0.0
        self._fail(EngineDead("The executor has been closed."))
        if is_sound:  # else nodes wait for the next engine
            self._commands.send(Shutdown())
        deadline = time.monotonic() + grace_s
        for child in self._children:
            child.end(max(0.0, deadline - time.monotonic()))

    def _gather(self, kind: type[A]) -> list[A]:
        """Wait for one answer from every rank, in rank order."""
        answers: dict[int, A] = {}
        while len(answers) < self._num_ranks:
            answer = self._answers.get()
            if isinstance(answer, OctavoError):
                self._answers.put(answer)  # for whoever asks next
                raise answer
            if not isinstance(answer, kind):
                raise EngineDead(f"A rank answered {type(answer).__name__}, not {kind.__name__}.")
            answers[answer.rank] = answer
        return [answers[rank] for rank in sorted(answers)]

    def _read(self) -> None:
        """Thread: every answer of the ranks, until interrupted."""
        try:
            while (reply := self._replies.receive()) is not None:
                self._take(reply)
        except Exception as error:
            self._lose(EngineDead(f"The answers of the ranks cannot be read: {error}"))

    def _take(self, reply: WorkerReply) -> None:
        match reply:
            case ModelRunnerOutput():
                with self._lock:
                    future = self._open_steps.popleft() if self._open_steps else None
                if future is not None:
                    future.set_result(reply)
            case Alive(rank):
                self._silent.discard(rank)
            case Failed():
                self._lose(reply.to_error())
            case _:
                self._answers.put(reply)

    def _on_exit(self, rank: int, code: int) -> None:
        """Thread of a rank's watcher: the process has ended. Its own account of why goes first."""
        self._cause_is_known.wait(LAST_WORDS_S)
        self._lose(EngineDead(f"The process of rank {rank} ended with exit code {code}."))

    def _lose(self, error: OctavoError) -> None:
        self._fail(error)
        self._on_loss(error)

    def _fail(self, error: OctavoError) -> None:
        """Fail all open and all later work; only the first error counts."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            steps, self._open_steps = self._open_steps, deque()
        self._cause_is_known.set()
        for future in steps:
            future.set_exception(error)
        self._answers.put(error)
