"""What the runner remembers of each request in the batch: its tokens and block tables, by row.

A row has one owner from `add` to `release`; everything in it is overwritten on `add`. Tokens and tables live
on the device, where the next step reads them; only lengths are known on the host. The runner appends what it
samples, so a step can be prepared before the host has seen the tokens of the one before. What the host adds
is collected, and `flush` brings all of it over at once.
"""

from copy import copy
from itertools import chain

import numpy as np
import torch

from octavo.messages.kv import CachePlan, CrossKV
from octavo.messages.step import UNTOLD, NewRequest, SchedulerOutput
from octavo.runtime.transfer import Array, send, to_device


class RequestState:
    """Per-request tensors by row; one row more than requests, `spare_row`, serves rows without a request.

    token_ids:     [num_rows + 1, max_model_len + 1] int64 on the device
    block_tables:  [groups, num_rows + 1, max_blocks] int32 on the device
    host_tables:   the same on the host
    host_tokens:   token_ids, where the device is the host
    num_tokens:    [num_rows] int64 on the host, sampled tokens included
    shift:         how far behind its place each token stands
    lengths:       [num_rows + 1] int64 on the device: tokens of requests behind a chained step
    source_lens:   [num_rows + 1] int32 on the device, positions of each request's source, if there is one
    """

    def __init__(self, num_rows: int, max_model_len: int, plan: CachePlan, device: torch.device) -> None:
        sizes = plan.block_sizes or [plan.block_size]
        fixed = [group.spec.num_tokens if isinstance(group.spec, CrossKV) else 0 for group in plan.groups]
        self._is_fixed = [length > 0 for length in fixed]
        max_blocks = max(-(-(max_model_len + 1) // min(sizes)), -(-max(fixed, default=0) // min(sizes)))
        max_blocks += -max_blocks % 4  # a GPU gathers rows of whole 16 bytes in less than half of the time
        num_groups = len(plan.groups)
        self.spare_row, self.shift = num_rows, 0
        self.block_sizes = sizes
        # One number for all groups where it can be: then it broadcasts over them at the end only.
        is_one = len(set(sizes)) == 1
        self._sizes = np.array(sizes[0] if is_one else [[size] for size in sizes], np.int64)
        self._groups = slice(None) if is_one else np.arange(num_groups)[:, None]
        self._most_tokens = max_model_len + 1
        # One more than they are, so that `shifted` has as many.
        places = torch.zeros((num_rows + 1) * self._most_tokens + 1, dtype=torch.int64, device=device)
        self.token_ids = places[:-1].view(num_rows + 1, self._most_tokens)
        self._next_tokens = places[1:].view(num_rows + 1, self._most_tokens)
        self.block_tables = torch.zeros(
            (num_groups, num_rows + 1, max_blocks), dtype=torch.int32, device=device
        )
        self.host_tables = np.zeros(self.block_tables.shape, np.int32)
        self.host_tokens: Array | None = self.token_ids.numpy() if device.type == "cpu" else None
        self.reads_sources = any(self._is_fixed)
        self.source_lens = torch.ones(num_rows + 1, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        self.num_tokens = np.zeros(num_rows, np.int64)
        self.num_prompt_tokens = np.zeros(num_rows, np.int64)
        self.position_offsets: Array | None = None
        """[num_rows] int64: what ropes add to the positions behind all images; None = nothing."""
        self._num_blocks = [[0] * num_rows for _ in range(num_groups)]
        self._rows: dict[str, int] = {}
        self._free = list(range(num_rows - 1, -1, -1))
        self._unsettled: set[int] = set()
        """Rows whose number of tokens only the engine knows, since drafts were verified."""
        self._new_tokens = _Writes(self.token_ids)
        self._new_blocks = _Writes(self.block_tables)
        self._new_lens = _Writes(self.source_lens)

    def shifted(self) -> "RequestState":
        """Return the same state, except that each place shows the token behind it."""
        other = copy(self)
        other.token_ids, other.shift = self._next_tokens, 1
        other.host_tokens = None if self.host_tokens is None else self._next_tokens.numpy()
        return other

    def rows(self, request_ids: list[str]) -> Array:
        """Return the rows of these requests, [R] int64."""
        return np.fromiter(map(self._rows.__getitem__, request_ids), np.int64, len(request_ids))

    @property
    def num_requests(self) -> int:
        """Return the number of requests that have a row."""
        return len(self._rows)

    def places(self, rows: Array, positions: Array) -> Array:
        """Return the indexes of the tokens at these positions of these rows in `token_ids`, seen as flat."""
        places: Array = rows * self._most_tokens + positions
        return places

    def rope_positions(self, rows: Array, positions: Array) -> Array:
        """Return what ropes take for these positions of these rows."""
        return positions if self.position_offsets is None else positions + self.position_offsets[rows]

    def cache_slots(self, rows: Array, positions: Array) -> Array:
        """Return the cache slots of these positions of these rows, by group: [groups, T]."""
        columns, offsets = np.divmod(positions, self._sizes)
        blocks = self.host_tables[self._groups, rows, columns].astype(np.int64)
        found: Array = blocks * self._sizes + offsets
        return found

    def capacity(self, rows: Array) -> Array:
        """Return how many positions of these rows have a block in every group and a place for a token."""
        covered = [
            np.array(counts, np.int64)[rows] * size
            for counts, size, is_fixed in zip(self._num_blocks, self.block_sizes, self._is_fixed, strict=True)
            if not is_fixed
        ]
        most: Array = np.minimum.reduce([*covered, np.full(len(rows), self._most_tokens - 1)])
        return most

    @property
    def spare_place(self) -> int:
        """Return the index of the spare row's first token in `token_ids`, seen as flat."""
        return self.spare_row * self._most_tokens

    def add(self, request: NewRequest) -> int:
        """Give the request a row and fill it; returns the row."""
        row = self._free.pop()
        self._rows[request.request_id] = row
        self._new_tokens.put(row * self._most_tokens, request.token_ids)
        self.num_tokens[row] = len(request.token_ids)
        self.num_prompt_tokens[row] = request.num_prompt_tokens
        if request.spec.source is not None:
            self._new_lens.put(row, [request.spec.source.num_tokens])
        for counts in self._num_blocks:
            counts[row] = 0
        return row

    def release(self, request_id: str) -> int:
        """Free the request's row; returns it."""
        row = self._rows.pop(request_id)
        self._free.append(row)
        self._unsettled.discard(row)
        return row

    def extend_tables(self, rows: Array, step: SchedulerOutput) -> None:
        """Append the step's new blocks to the tables of their requests."""
        _, num_rows, num_columns = self.host_tables.shape
        for index, blocks_by_group in step.new_block_ids.items():
            row = int(rows[index])
            for group, blocks in enumerate(blocks_by_group):
                if blocks:
                    start = self._num_blocks[group][row]
                    self._new_blocks.put((group * num_rows + row) * num_columns + start, blocks)
                    self.host_tables[group, row, start : start + len(blocks)] = blocks
                    self._num_blocks[group][row] += len(blocks)

    def flush(self) -> None:
        """Bring all that was added since the last call to the device: one copy, however much it is."""
        every = self._new_tokens, self._new_blocks, self._new_lens
        writes = [writes for writes in every if writes.values]
        if self.host_tokens is not None:
            for write in writes:
                places, values = write.take()
                write.target.numpy()[places] = values
        elif writes:
            arrays = [array for write in writes for array in write.take()]
            sent = send(arrays, self.token_ids.device)
            for index, write in enumerate(writes):
                write.target[sent[2 * index]] = sent[2 * index + 1].to(write.target.dtype)

    def append(self, rows: Array, ends: Array, token_ids: torch.Tensor) -> None:
        """Put a sampled token behind the `ends` first tokens of each of these rows.

        rows, ends: [rows] int64 on the host; token_ids: [rows] int64 on the device
        """
        if self.host_tokens is not None:
            self.host_tokens[rows, ends] = token_ids.numpy()
        else:
            places = to_device(self.places(rows, ends), self.token_ids.device)
            self.token_ids.view(-1)[places] = token_ids
        self.num_tokens[rows] = ends + 1

    def are_last(self, rows: Array, computed: list[int]) -> bool:
        """Return True if the tokens behind the `computed` first ones are the last of these rows."""
        late = rows[np.array(computed, np.int64) + 1 < self.num_tokens[rows]]
        return all(row in self._unsettled for row in late.tolist())

    def put_behind(self, rows: Array, ends: Array, counts: Array, token_ids: torch.Tensor) -> None:
        """Put `counts` of the tokens [rows, most counts] behind the first `ends` of each row."""
        there = np.arange(token_ids.shape[1]) < counts[:, None]
        places = self.places(rows[:, None], ends[:, None] + np.arange(token_ids.shape[1]))
        targets = to_device(np.where(there, places, self.spare_place), self.token_ids.device)
        self.token_ids.view(-1)[targets] = token_ids.to(targets.device)

    def tokens_behind(self, rows: Array, ends: Array, count: int) -> torch.Tensor:
        """Return `count` tokens behind the first `ends` of each row, [rows, count]; any behind its end."""
        positions = np.minimum(ends[:, None] + np.arange(count), self._most_tokens - 1)
        places = self.places(rows[:, None], positions)
        return self.token_ids.view(-1)[to_device(places, self.token_ids.device)]

    def put_ahead(self, rows: Array, step: SchedulerOutput) -> None:
        """Put the step's drafts behind the known tokens of their requests; `flush` sends them.

        Before, take over the lengths of those whose drafts were verified: all but the last token is computed.
        """
        if self._unsettled:
            for row, num_computed in zip(rows.tolist(), step.num_computed_tokens, strict=True):
                if row in self._unsettled:
                    self.num_tokens[row] = num_computed + 1
                    self._unsettled.discard(row)
        for place, drafts in step.drafts.items():
            row, num_known = int(rows[place]), step.num_computed_tokens[place] + 1
            if UNTOLD not in drafts and place not in step.unread:
                self._new_tokens.put(row * self._most_tokens + num_known, drafts)
            self._unsettled.add(row)
        self._unsettled.update(int(rows[place]) for place in step.unread)


class _Writes:
    """Collects runs of numbers to be written into a tensor, by index into it, seen as flat; none twice."""

    def __init__(self, target: torch.Tensor) -> None:
        self.target = target.view(-1)
        self.values: list[list[int]] = []
        self._places: list[int] = []

    def put(self, place: int, values: list[int]) -> None:
        self._places.append(place)
        self.values.append(values)

    def take(self) -> tuple[Array, Array]:
        """Return (places, values) collected so far, and forget them."""
        lengths = np.array([len(run) for run in self.values], np.int64)
        ends = lengths.cumsum()
        places = np.arange(ends[-1]) + (np.array(self._places) - ends + lengths).repeat(lengths)
        values = np.fromiter(chain.from_iterable(self.values), np.int64, ends[-1])
        self._places, self.values = [], []
        return places, values
