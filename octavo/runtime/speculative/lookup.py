"""`Lookup` guesses what followed the last tokens of a request where they stand earlier in it: ngram_gpu.

The tokens never leave the device, so those of steps in flight are looked up, too.
"""

from torch import Tensor

from octavo.config.speculative import Speculation
from octavo.runtime.kernels.chained import ChainKernels
from octavo.runtime.speculative.drafter import Drafter, Turn
from octavo.runtime.transfer import send
from octavo.runtime.worker.chained_steps import Links


class Lookup(Drafter):
    """Has neither weights nor a cache."""

    chains, idles = True, True

    def __init__(self, wanted: Speculation, kernels: ChainKernels) -> None:
        self.kv_specs, self.weight_bytes = [], 0
        self._bounds, self._look_up = (wanted.least_match, wanted.most_match), kernels.look_up

    def propose(self, turn: Turn) -> Tensor | None:
        """See Drafter."""
        if not turn.counts.any():
            return None
        rows, lengths = send([turn.rows, turn.ends + 1], self._state.token_ids.device)
        return self._look_up(self._state.token_ids, rows, lengths, *self._bounds, int(turn.counts.max()))

    def chain(self, links: Links) -> None:
        """See Drafter."""
        if links.end.count:
            links.look_up(*self._bounds)
