"""A `Drafter` guesses the tokens that follow a step. `DraftPart` asks it behind each step of the runner.

A drafter with a KV cache keeps it in the blocks of the requests, in layers of its own. So a prefix that is
found in the cache has the keys and values of both models. Called on one thread, step by step.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from octavo.messages.kv import KVCacheSpec
from octavo.runtime.models.interface import Model
from octavo.runtime.sampling.sampler import Kind, Sampler
from octavo.runtime.transfer import Array, send, to_device
from octavo.runtime.worker.chained_steps import Links
from octavo.runtime.worker.kv_tensors import KVTensors
from octavo.runtime.worker.pending import PendingStep
from octavo.runtime.worker.prepare import Work
from octavo.runtime.worker.replayer import Replay, Replayer
from octavo.runtime.worker.request_state import RequestState

MakeReplayer = Callable[[Model, KVTensors, RequestState], Replayer]


@dataclass(slots=True)
class Turn:
    """What a step left behind.

    work:   what it computed; hidden: of its samples or of all tokens, for drafters that read them
    rows:   [R] rows of its requests
    begins: [R] tokens computed before; ends: tokens computed for good, drafts that came true included
    counts: [R] tokens to guess, 0 for a request that has not sampled
    lasts:  [R] the row of `work` that sampled the last token; arbitrary where nothing was sampled
    cached: [R] tokens that a request found in blocks, which have what drafters keep; -1 = not its first turn
    """

    work: Work
    hidden: Tensor | None
    rows: Array
    begins: Array
    ends: Array
    counts: Array
    lasts: Array
    cached: Array

    @property
    def kept_states(self) -> Tensor:
        """Return the hidden states of the tokens from `begins` to `ends` of each request, of those of all."""
        assert self.hidden is not None
        lengths = self.ends - self.begins
        firsts = self.work.starts[np.searchsorted(self.work.owners, np.arange(len(self.rows)))]
        kept = np.arange(lengths.sum()) + (firsts - lengths.cumsum() + lengths).repeat(lengths)
        return self.hidden[to_device(kept, self.hidden.device)]


class Drafter(ABC):
    """Guesses tokens; owns weights, and perhaps layers with a cache."""

    reads: ClassVar[Literal["", "samples", "all"]] = ""
    """Tokens whose hidden states it needs."""
    kv_specs: list[KVCacheSpec]
    """Of its attention layers, which come behind the model's."""
    weight_bytes: int
    most: int = 1 << 10
    """Tokens that it can guess."""
    num_spare: ClassVar[int] = 0
    """Places behind those of its guesses that it writes to."""
    draws: bool = True
    """It draws with the model's noise; otherwise it takes its greedy tokens."""
    chains: ClassVar[bool] = False
    """It has `chain`."""
    idles: ClassVar[bool] = False
    """It need not see steps behind which nothing is to be guessed."""

    def equip(self, cache: KVTensors, state: RequestState, sampler: Sampler, make: MakeReplayer) -> None:
        """Work over the runner's cache and state as they are allocated now."""
        self._state, self._sampler = state, sampler

    @abstractmethod
    def propose(self, turn: Turn) -> Tensor | None:
        """Guess up to `turn.counts` tokens behind each request: [R, most counts] int64, on any device.

        What is beyond a request's count is arbitrary. None where nothing is to be guessed.
        """

    def chain(self, links: Links) -> None:
        """Guess behind a step that is captured: by the same launches whatever came true; see Links."""
        raise NotImplementedError

    def follows(self, rows: Array, counts: Array) -> bool:
        """Return True if it can guess `counts` tokens behind a chained step of these rows, the next one."""
        return True

    def miss(self, rows: Array) -> None:
        """Learn that a step of these rows comes that it does not see."""

    def kind(self, rows: Array) -> Kind:
        """Return how tokens of these rows are guessed."""
        return self._sampler.kind_of(rows) if self.draws else Kind.GREEDY

    def choose(self, logits: Tensor, rows: Array, positions: Array) -> Tensor:
        """Choose a token for each of these rows, with the noise that the model will draw with there.

        positions: [rows] of the tokens in their sequences; so similar distributions give the same token.
        """
        places = positions - self._state.num_prompt_tokens[rows]
        kind = self.kind(rows)
        if kind is not Kind.GREEDY and (rejection := self._sampler.rejection) is not None:
            places = rejection.keep(self._sampler, logits, rows, places)
        on_device = send([rows, places], logits.device)
        ids = self._sampler.choose(logits, on_device[0], on_device[1], kind).token_ids
        return ids.clamp_(0, self._sampler.vocab_size - 1)


class KVView(KVTensors):
    """Shows the layers of a cache from `first` on as a cache."""

    def __init__(self, cache: KVTensors, first: int) -> None:
        self.by_layer = cache.by_layer[first:]
        self.group_of_layer = cache.group_of_layer[first:]


def hidden_states(replayer: Replayer, work: Work, replay: Replay | None) -> Tensor:
    """Compute the last hidden states, by `replay` if the replayer has found one for this work."""
    if replay is not None:
        replayed = replay()
        assert isinstance(replayed, Tensor)
        return replayed
    hidden = replayer.compute(work, (), PendingStep(0, [], work.samples))
    replayer.after_eager(work, None)
    return hidden


def columns(found: list[tuple[Array, Tensor]], num_rows: int) -> Tensor | None:
    """Return [rows, len(found)] of (rows, tokens) by column; -1 where there is none."""
    if not found:
        return None
    table = torch.full((num_rows, len(found)), -1, dtype=torch.int64, device=found[0][1].device)
    for column, (rows, ids) in enumerate(found):
        table[torch.from_numpy(rows).to(ids.device), column] = ids
    return table
