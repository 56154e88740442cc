"""`PoolHead` makes embeddings, scores and labels of the hidden states of whole prompts.

Prompts may come in several steps: their hidden states are kept until the last one, and pooled together, so
that results have the same bits however a prompt was cut.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from octavo.config.pooling import PoolingConfig
from octavo.messages.pooling import LateInteractionParams, PoolingParams
from octavo.messages.request import RequestSpec
from octavo.messages.step import NewRequest
from octavo.runtime.batch import ForwardBatch
from octavo.runtime.heads.head import Head
from octavo.runtime.heads.modes import POOLS, SEGMENT_POOLS
from octavo.runtime.models.interface import Family, Model
from octavo.runtime.sampling.output import HostCopies
from octavo.runtime.transfer import to_device
from octavo.runtime.worker.pending import PendingStep, PendingVectors
from octavo.runtime.worker.prepare import Work
from octavo.runtime.worker.request_state import RequestState

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "sigmoid": torch.sigmoid,
    "softmax": lambda x: x.softmax(-1),
}
MAX_QUERIES = 1024
"""That are kept for documents; then the oldest goes."""


class _Whole(NamedTuple):
    """A prompt of which all is computed. hidden: [tokens, hidden_size]"""

    request_id: str
    row: int
    spec: RequestSpec
    hidden: Tensor

    @property
    def params(self) -> PoolingParams:
        assert isinstance(self.spec.task, PoolingParams)
        return self.spec.task


class PoolHead(Head):
    """Remembers what each row wants, and what came of its prompt so far."""

    def __init__(self, config: PoolingConfig, state: RequestState) -> None:
        super().__init__()
        self._config, self._state = config, state
        self._earlier: dict[int, list[Tensor]] = {}
        self._queries: dict[str, tuple[Tensor, int]] = {}
        """Vectors, and how many documents are to come; by the keys of late interaction."""

    def read(self, request: NewRequest) -> RequestSpec:
        return request.spec

    def remove(self, row: int) -> None:
        super().remove(row)
        self._earlier.pop(row, None)

    @property
    def is_idle(self) -> bool:
        """See StepPart: all hidden states are wanted, which no replay gives."""
        return False

    def before(self, work: Work, batch: ForwardBatch) -> None:
        """Ask for all hidden states; tell which tokens are of the second text of a pair."""
        batch.wanted = None
        starts = [self._wanted[row].pair_start for row in work.rows.tolist()]
        if any(starts):
            firsts = np.array([start or self._state.token_ids.shape[1] for start in starts])
            borders = to_device(firsts.repeat(np.diff(work.starts)), batch.positions.device)
            batch.token_types = (batch.positions >= borders).long()

    def after(self, work: Work, hidden: Tensor, model: Model, outcome: PendingStep) -> None:
        assert isinstance(model, Family)
        is_all = not self._earlier
        whole = self._take(work, hidden, outcome.request_ids)
        per_token = [prompt for prompt in whole if prompt.params.is_per_token]
        for prompt in per_token:
            made: Tensor | None
            made = vectors = self._per_token(prompt, model)
            if (late := prompt.params.late_interaction_params) is not None:
                made = self._interact(late, prompt, vectors)
            if made is not None:
                self._send(outcome, [prompt], made[None])
            elif late is not None:
                outcome.errors[prompt.request_id] = f"There is no query {late.query_key!r:.99} to score by."
        pooled = [prompt for prompt in whole if not prompt.params.is_per_token] if per_token else whole
        if pooled:
            joined = hidden if is_all and len(pooled) == len(work.rows) else None
            self._finish(outcome, pooled, self._results(self._pool_all(pooled, joined, model), model))

    def _take(self, work: Work, hidden: Tensor, request_ids: list[str]) -> list[_Whole]:
        """Return the prompts that are complete; keep the hidden states of the others."""
        taken, parts = [], hidden.split_with_sizes(np.diff(work.starts).tolist())
        is_last = (work.ends == self._state.num_tokens[work.rows]).tolist()
        for index, (row, part) in enumerate(zip(work.rows.tolist(), parts, strict=True)):
            if not is_last[index]:
                self._earlier.setdefault(row, []).append(part.clone())
                continue
            earlier = self._earlier.pop(row, None)
            states = torch.cat([*earlier, part]) if earlier else part
            taken.append(_Whole(request_ids[index], row, self._wanted[row], states))
        return taken

    def _pool_all(self, prompts: list[_Whole], joined: Tensor | None, model: Family) -> Tensor:
        """Return the pooled states of some prompts, a row each; on a GPU all of them in a few launches.

        joined: their hidden states, if they are one behind the other
        """
        config = self._config
        is_plain = config.include_prompt and not config.sparse and SEGMENT_POOLS.keys() >= set(config.modes)
        if not is_plain or prompts[0].hidden.device.type == "cpu":
            return torch.stack([self._pool(prompt, model) for prompt in prompts])
        hidden = (torch.cat([prompt.hidden for prompt in prompts]) if joined is None else joined).float()
        lengths = to_device(np.array([len(prompt.hidden) for prompt in prompts]), hidden.device)
        return torch.cat([SEGMENT_POOLS[mode](hidden, lengths) for mode in config.modes], 1)

    def _pool(self, prompt: _Whole, model: Family) -> Tensor:
        """Return the vectors of all modes, one behind the other, float32; of SPLADE, a term's weights."""
        if self._config.sparse:
            weights = model.logits(prompt.hidden).float().relu()
            for _ in range(self._config.sparse_logs):
                weights = weights.log1p()
            return weights.amax(0) if self._config.sparse == "max" else weights.sum(0)
        hidden = prompt.hidden.float()
        skip = 0 if self._config.include_prompt else prompt.spec.num_instruction_tokens
        return torch.cat([POOLS[mode](hidden, skip) for mode in self._config.modes])

    def _results(self, x: Tensor, model: Family) -> Tensor:
        """Return embeddings or labels' logits of pooled states; tokens that stand for labels have logits."""
        tokens = list(self._config.label_tokens)
        if not tokens:
            return model.pooler(x) if not self._config.sparse else x
        logits = model.logits(x)[:, tokens].float()
        return logits[:, 1:] - logits[:, :1] if self._config.is_log_odds else logits

    def _finish(self, outcome: PendingStep, prompts: list[_Whole], x: Tensor) -> None:
        """Cut, then normalise; or make scores of logits: those that want the same together."""
        wishes: dict[tuple[int | None, bool | None], list[int]] = {}
        for index, prompt in enumerate(prompts):
            wishes.setdefault((prompt.params.dimensions, prompt.params.use_activation), []).append(index)
        for (dimensions, use_activation), indexes in wishes.items():
            made = self._activate((x if len(wishes) == 1 else x[indexes])[:, :dimensions], use_activation)
            self._send(outcome, [prompts[i] for i in indexes], made)

    def _activate(self, x: Tensor, use_activation: bool | None) -> Tensor:
        config = self._config
        if config.is_embedder:
            wanted = config.normalize if use_activation is None else use_activation
            return functional.normalize(x, dim=-1) if wanted else x
        return x if use_activation is False else _ACTIVATIONS[config.activation](x)

    def _per_token(self, prompt: _Whole, model: Family) -> Tensor:
        """Return a vector for each token, or for each that ends a step, [tokens, size]."""
        task = str(prompt.params.task)
        if task in model.pooler.projections:
            x = model.pooler.projections[task](prompt.hidden)
            return self._activate(x, prompt.params.use_activation) if task == "token_embed" else x
        hidden, tag = prompt.hidden, prompt.params.step_tag_id
        if tag is not None:
            hidden = hidden[self._state.token_ids[prompt.row, : len(hidden)] == tag]
        x = self._results(hidden, model)
        return self._activate(x[:, : prompt.params.dimensions], prompt.params.use_activation)

    def _interact(self, late: LateInteractionParams, prompt: _Whole, vectors: Tensor) -> Tensor | None:
        """Keep a query's vectors, for 0; or return a document's score, None without its query."""
        if late.mode == "cache_query":
            self._queries.pop(late.query_key, None)
            if len(self._queries) == MAX_QUERIES:
                del self._queries[next(iter(self._queries))]
            self._queries[late.query_key] = vectors.float(), late.query_uses or 1
            return vectors.new_zeros(())
        query, uses = self._queries.pop(late.query_key, (None, 0))
        if query is None:
            return None
        if uses > 1:
            self._queries[late.query_key] = query, uses - 1
        if skipped := self._config.skipped_tokens:
            ids = self._state.token_ids[prompt.row, : len(vectors)]
            vectors = vectors[~torch.isin(ids, ids.new_tensor(skipped))]
        return functional.pad(query @ vectors.float().T, (0, 1), value=-np.inf).amax(1).sum()

    def _send(self, outcome: PendingStep, prompts: list[_Whole], results: Tensor) -> None:
        """Send results, [prompts, …], to the host."""
        copies = HostCopies([results.float().contiguous()])
        outcome.vectors.append(PendingVectors([prompt.request_id for prompt in prompts], copies))
