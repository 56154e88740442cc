"""A planned step becomes tensors here: vectorized over tokens, without a loop over requests.

Everything the host knows of a step goes to the device in one copy. T = tokens of the step, R = its requests,
S = those of them that sample.
"""

from dataclasses import dataclass

import numpy as np
import torch

from octavo.messages.step import UNTOLD, SchedulerOutput
from octavo.runtime.batch import ForwardBatch, group_tables
from octavo.runtime.lora.sites import Reach
from octavo.runtime.transfer import Array, send
from octavo.runtime.worker.kv_tensors import KVTensors
from octavo.runtime.worker.request_state import RequestState

_COMMON_TOKENS = 512
_FEWEST_ALIKE = 64
_SHARE_ALIKE = 0.75


@dataclass(slots=True)
class ChainedRows:
    """What a chained step (worker/chained_steps) is told of each row of its work, as in PackedInputs.

    heads: the first row of each request
    """

    num_known: Array
    drafts: Array
    num_taken: Array
    num_wanted: Array
    firsts: Array
    heads: Array

    @classmethod
    def of(cls, step: SchedulerOutput, owners: Array) -> "ChainedRows":
        """Return what a step says of its rows; owners: as in Work."""
        heads = np.searchsorted(owners, np.arange(len(step.request_ids)))
        drafts = np.full(len(owners), UNTOLD)
        of_request = np.full((3, len(heads)), -1)
        of_request[0, step.unread] = np.array(step.num_computed_tokens, np.int64)[step.unread] + 1
        of_request[2] = step.num_drafts or 0
        for place, given in step.drafts.items():
            drafts[heads[place] + 1 :][: len(given)] = given
            of_request[1, place] = step.num_taken.get(place, -1)
        known, taken, wanted = of_request[:, owners]
        return cls(known, drafts, taken, wanted, heads[owners], heads)


@dataclass(slots=True)
class Work:
    """Says on the host which tokens a step computes.

    A request whose drafts are verified has a row for its token and one for each draft.

    rows:     [R] int64, row of each request in the state
    computed: [R] int64, tokens computed before
    ends:     [R] int64, tokens computed after
    starts:   [R + 1] int64, first token of each request in the batch
    samples:  [S] int64, indexes into R of the requests that sample
    owners:   [R] int64, place of each in the step's requests
    """

    rows: Array
    computed: Array
    ends: Array
    starts: Array
    samples: Array
    owners: Array
    num_singles: int = 0
    """The number of requests, all at the beginning, that compute one token each."""
    reach: Reach = Reach.NOTHING
    """Of its tokens' adapters: recorded steps of their own compute what these change."""
    chained: ChainedRows | None = None
    places: Array | None = None
    """[T] int64, the rows of the batch that compute the tokens, where they stand in another order."""


def read_step(step: SchedulerOutput, rows: Array, state: RequestState) -> Work:
    """Lay out the step's tokens one request after the other."""
    computed = np.fromiter(step.num_computed_tokens, np.int64, len(rows))
    scheduled = np.fromiter(step.num_scheduled_tokens, np.int64, len(rows))
    owners = np.arange(len(rows))
    if step.drafts:
        counts = np.fromiter((1 + len(step.drafts.get(place, ())) for place in owners.tolist()), np.int64)
        owners = owners.repeat(counts)
        offsets = np.arange(len(owners)) - (counts.cumsum() - counts)[owners]
        rows, computed, scheduled = rows[owners], computed[owners] + offsets, scheduled[owners]
    starts = np.arange(len(rows) + 1)
    (others,) = (scheduled != 1).nonzero()
    num_singles = int(others[0]) if others.size else len(rows)
    if others.size:
        scheduled.cumsum(out=starts[1:])
    ends = computed + scheduled
    (samples,) = (ends >= state.num_tokens[rows]).nonzero()
    return Work(rows, computed, ends, starts, samples, owners, num_singles)


def token_positions(work: Work) -> tuple[Array, Array]:
    """Return the row of each token in the state, and its place in its request, [T] both."""
    if work.num_singles == len(work.rows):
        return work.rows, work.computed
    lengths = work.ends - work.computed
    positions = np.arange(work.starts[-1]) + (work.computed - work.starts[:-1]).repeat(lengths)
    return work.rows.repeat(lengths), positions


def locate(work: Work, state: RequestState) -> tuple[Array, Array, Array]:
    """Return the tokens' places in the state's token_ids [T], what ropes take for their positions [T], and
    their cache slots [groups, T].
    """
    rows, positions = token_positions(work)
    at_rope = state.rope_positions(rows, positions)
    return state.places(rows, positions), at_rope, state.cache_slots(rows, positions)


def make_batch(work: Work, state: RequestState, cache: KVTensors) -> tuple[ForwardBatch, torch.Tensor]:
    """Return the batch, which wants all tokens, and the last token of each that samples, [S] int64."""
    last_rows = work.starts[work.samples + 1] - 1
    common_start = have_common_start(work, state)
    arrays = [*locate(work, state), work.rows, work.starts, work.ends, last_rows]
    places, positions, cache_slots, rows, starts, lengths, last = send(arrays, state.token_ids.device)
    batch = ForwardBatch(
        input_ids=state.token_ids.view(-1)[places].clamp_(min=0),  # a draft may be none, -1
        positions=positions,
        cu_q_lens=starts.int(),
        kv_lens=lengths.int(),
        kv_caches=cache.by_layer,
        groups=group_tables((tables[rows] for tables in state.block_tables), cache_slots),
        group_of_layer=cache.group_of_layer,
        num_singles=work.num_singles,
        common_start=common_start,
        from_start=not work.computed[work.num_singles :].any(),
        longest_q=int((work.ends - work.computed).max()),
        source_lens=state.source_lens[rows] if state.reads_sources else None,
    )
    return batch, last


def have_common_start(work: Work, state: RequestState) -> bool:
    """Return True if many requests, all decoding, mostly share their first blocks with their neighbours."""
    block = _COMMON_TOKENS // state.block_sizes[0]
    if not _FEWEST_ALIKE <= work.num_singles == len(work.rows) or block >= state.host_tables.shape[2]:
        return False
    if not len(state.host_tables):
        return False
    ids = np.where(work.computed > _COMMON_TOKENS, state.host_tables[0, work.rows, block], 0)
    num_alike = np.count_nonzero((ids[1:] == ids[:-1]) & (ids[1:] > 0))
    return bool(num_alike >= _SHARE_ALIKE * (len(ids) - 1))
