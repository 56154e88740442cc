"""`Lockstep`: replicas that share experts compute their steps together. A part of the runner's steps.

Before a step its ranks tell all others how many tokens it has; then all know the size of the messages. A rank
without work says so, and takes part in the exchange of the others' tokens. While no rank has any, they ask
each other ever more seldom.
"""

import threading
import time
from bisect import bisect_left
from collections.abc import Callable
from concurrent.futures import Future

import torch

from octavo.config.engine import EngineConfig
from octavo.messages.step import NewRequest
from octavo.runtime.distributed.context import ParallelContext
from octavo.runtime.distributed.exchange import TokenExchange
from octavo.runtime.layers.experts import Experts
from octavo.runtime.models.interface import Model
from octavo.runtime.platforms.platform import Capture, Platform
from octavo.runtime.worker.prepare import Work
from octavo.runtime.worker.step_part import StepPart
from octavo.runtime.worker.step_shapes import step_sizes

_PATIENCE_S = 0.005
"""The next step of a rank that had one may come within this time."""
_SHORTEST_S, _LONGEST_S = 0.001, 0.008
"""Between two questions while nobody has work."""


class Lockstep(StepPart):
    """Agrees on every step with the other ranks of all replicas."""

    def __init__(
        self,
        parallel: ParallelContext,
        exchange: TokenExchange,
        sizes: list[int],
        model: Callable[[], Model],
        capture: Capture | None,
    ) -> None:
        """sizes: that decoding steps are padded to."""
        super().__init__()
        self._parallel, self._exchange, self._sizes, self._model = parallel, exchange, sizes, model
        self._capture, self._captured = capture, dict[int, Callable[[], None]]()
        """How to take part in decoding steps of each size."""
        self._heard = torch.zeros((parallel.steps.size, 2), dtype=torch.int64)
        """Of each rank: tokens of its step; whether some request has several."""
        self._answer: Future[None] | None = None
        """Of the others, while this rank has said that it has no work."""
        self._pause_s, self._due_s = _SHORTEST_S, 0.0
        self.joined: Callable[[], None] = lambda: None
        """Is called behind a step of others."""

    def measure(self) -> None:
        """Find the fastest ways for tokens of this model; those of CPUs are not measured."""
        layers = self._layers()
        if layers and layers[0].no_tokens.device.type != "cpu":
            row = layers[0].no_tokens.new_zeros((1, layers[0].no_tokens.shape[1]))
            self._exchange.measure(row, layers[0].top_k, layers[0].num_experts)

    def _layers(self) -> list[Experts]:
        return [module for module in self._model().modules() if isinstance(module, Experts)]

    def read(self, request: NewRequest) -> None:
        """See StepPart: requests want nothing of it."""

    def begin(self, work: Work) -> None:
        self._due_s = 0.0
        if self._answer is not None:
            self._join()
        while True:
            self._tell(int(work.starts[-1]), has_prompts=work.num_singles < len(work.rows))
            if self._agree()[self._parallel.steps.rank // self._parallel.tp_size]:
                return
            self._take_part()  # another rank of this replica had said that it has no work, before it came

    @torch.inference_mode()
    def idle(self, wake: Callable[[], None]) -> float | None:
        """Take part in steps of others, while there is nothing else to do.

        Returns after how many seconds to call it again; None: when `wake` was called
        """
        now = time.monotonic()
        if self._answer is not None and self._answer.done():
            has_work = any(self._join())
            self._pause_s = _SHORTEST_S if has_work else min(2 * self._pause_s, _LONGEST_S)
            self._due_s = now if has_work else now + self._pause_s
        if self._answer is None:
            self._due_s = self._due_s or now + _PATIENCE_S
            if now < self._due_s:
                return self._due_s - now
            self._answer = Future()
            self._answer.add_done_callback(lambda _: wake())
            threading.Thread(target=self._say_nothing, args=(self._answer,), daemon=True).start()
        return None

    def _say_nothing(self, answer: Future[None]) -> None:
        """Thread: tell the others that there is no work here."""
        try:
            self._tell(0, has_prompts=False)
            answer.set_result(None)
        except Exception as error:  # raised again by `_join`
            answer.set_exception(error)

    def _join(self) -> list[int]:
        """Take part in a step in which this rank has nothing; return what `_agree` does."""
        assert self._answer is not None
        self._answer.result()
        self._answer = None
        counts = self._agree()
        self._take_part()
        return counts

    def _take_part(self) -> None:
        size = self._exchange.num_tokens
        if not size:
            return
        if self._capture is None or not self._exchange.is_captured:
            self._join_layers()
        else:
            if size not in self._captured:
                self._captured[size] = self._capture(self._join_layers)
            self._captured[size]()
        self.joined()

    def _join_layers(self) -> None:
        for layer in self._layers():
            layer.join()

    def release(self) -> None:
        self._captured = {}

    def _tell(self, num_tokens: int, *, has_prompts: bool) -> None:
        """Tell the others of this rank's step, and wait for what they say."""
        told = torch.tensor([[num_tokens, int(has_prompts)]])
        self._heard = self._parallel.steps.gather_rows(told)

    def _agree(self) -> list[int]:
        """Return the tokens of each replica, all of whose ranks have come to its step; 0 of others."""
        told = self._heard.view(-1, self._parallel.tp_size, 2).amin(1)
        most, has_prompts = told.amax(0).tolist()
        is_short = not has_prompts and 0 < most <= self._sizes[-1]
        self._exchange.is_captured = is_short
        self._exchange.num_tokens = self._sizes[bisect_left(self._sizes, most)] if is_short else most
        counts: list[int] = told[:, 0].tolist()
        return counts


def make_lockstep(
    parallel: ParallelContext, config: EngineConfig, platform: Platform, model: Callable[[], Model]
) -> Lockstep | None:
    """Return what the worker's steps take part in, if replicas share experts."""
    if parallel.exchange is None:
        return None
    sizes = step_sizes(config.scheduler.max_num_rows)
    capture = None if config.parallel.enforce_eager else platform.graph_capture()
    return Lockstep(parallel, parallel.exchange, sizes, model, capture)
