"""From a planned step to tensors: vectorized over tokens, no loop over requests (but those with embeddings).

T = tokens of the step, R = requests of the step.
"""

from dataclasses import dataclass

import numpy as np
import torch

from octavo.messages.step import SchedulerOutput
from octavo.runtime.batch import ForwardBatch, GivenEmbeds, GroupTables
from octavo.runtime.sampling.slots import to_device
from octavo.runtime.worker.kv_tensors import KVTensors
from octavo.runtime.worker.request_state import RequestState


@dataclass(slots=True)
class PreparedStep:
    """The batch, and which of its requests sample.

    slots:    [R] int64, slot of each request
    starts:   [R + 1] int64, first token of each request in the batch
    samples:  [S] int64, indexes into R of the requests that sample
    """

    batch: ForwardBatch
    slots: np.ndarray
    starts: np.ndarray
    samples: np.ndarray


def prepare(step: SchedulerOutput, slots: list[int], state: RequestState, cache: KVTensors) -> PreparedStep:
    """Lay out the step's tokens one request after the other."""
    slot = np.asarray(slots, np.int64)
    computed = np.asarray(step.num_computed_tokens, np.int64)
    scheduled = np.asarray(step.num_scheduled_tokens, np.int64)
    starts = np.concatenate([[0], np.cumsum(scheduled)])
    kv_lens = computed + scheduled
    positions = np.arange(starts[-1]) + np.repeat(computed - starts[:-1], scheduled)

    device = state.token_ids.device
    token_slots = to_device(np.repeat(slot, scheduled), device)
    token_positions = to_device(positions, device)
    request_slots = to_device(slot, device)
    max_kv_len = int(kv_lens.max())
    block_size = cache.tensors[0].shape[2]
    num_blocks = -(-max_kv_len // block_size)
    groups = [
        GroupTables(
            block_tables=table[request_slots, :num_blocks],
            slots=table[token_slots, token_positions // block_size].long() * block_size
            + token_positions % block_size,
        )
        for table in state.block_tables
    ]
    batch = ForwardBatch(
        input_ids=state.token_ids[token_slots, token_positions],
        positions=token_positions,
        cu_q_lens=to_device(starts.astype(np.int32), device),
        kv_lens=to_device(kv_lens.astype(np.int32), device),
        max_q_len=int(scheduled.max()),
        max_kv_len=max_kv_len,
        kv_caches=cache.by_layer,
        groups=groups,
        group_of_layer=cache.group_of_layer,
        given_embeds=_given_embeds(state, slots, computed, starts) if state.prompt_embeds else None,
    )
    samples = np.flatnonzero(kv_lens == state.num_tokens[slot])
    return PreparedStep(batch, slot, starts, samples)


def _given_embeds(
    state: RequestState, slots: list[int], computed: np.ndarray, starts: np.ndarray
) -> GivenEmbeds | None:
    """The part of the prompts' own embeddings that this step computes."""
    rows, values = [], []
    for index, slot in enumerate(slots):
        if (embeds := state.prompt_embeds.get(slot)) is not None:
            part = embeds[computed[index] :][: starts[index + 1] - starts[index]]
            rows.append(torch.arange(len(part), device=embeds.device) + int(starts[index]))
            values.append(part)
    return GivenEmbeds(torch.cat(rows), torch.cat(values)) if rows else None
