"""What the runner remembers of each request in the batch: its tokens and block tables, in slots.

A slot has one owner from `add` to `release`; everything in it is overwritten on `add`. Tokens and tables live
on the device, where the next step reads them; only lengths are known on the host. The runner appends what it
samples, so a step can be prepared before the host has seen the tokens of the one before.
"""

import numpy as np
import torch

from octavo.messages.kv import CachePlan
from octavo.messages.step import NewRequest, SchedulerOutput
from octavo.runtime.sampling.slots import to_device


class RequestState:
    """Per-request tensors by slot.

    token_ids:     [num_slots, max_model_len + 1] int64 on the device
    block_tables:  per group [num_slots, max_blocks] int32 on the device
    num_tokens:    [num_slots] int64 on the host, sampled tokens included
    prompt_embeds: by slot, for requests that bring some, [rows, embedding_size] float32 on the device
    """

    def __init__(self, num_slots: int, max_model_len: int, plan: CachePlan, device: torch.device) -> None:
        max_blocks = -(-(max_model_len + 1) // plan.block_size)
        self.token_ids = torch.zeros((num_slots, max_model_len + 1), dtype=torch.int64, device=device)
        self.block_tables = [
            torch.zeros((num_slots, max_blocks), dtype=torch.int32, device=device) for _ in plan.groups
        ]
        self.num_tokens = np.zeros(num_slots, np.int64)
        self.num_prompt_tokens = np.zeros(num_slots, np.int64)
        self.prompt_embeds: dict[int, torch.Tensor] = {}
        self._num_blocks = np.zeros((len(plan.groups), num_slots), np.int64)
        self._slots: dict[str, int] = {}
        self._free = list(range(num_slots - 1, -1, -1))

    def slots(self, request_ids: list[str]) -> list[int]:
        """The slots of these requests."""
        return [self._slots[request_id] for request_id in request_ids]

    def add(self, request: NewRequest) -> int:
        """Give the request a slot and fill it; returns the slot."""
        slot = self._free.pop()
        self._slots[request.request_id] = slot
        count = len(request.token_ids)
        self.token_ids[slot, :count] = torch.tensor(request.token_ids)
        self.num_tokens[slot] = count
        self.num_prompt_tokens[slot] = request.num_prompt_tokens
        self._num_blocks[:, slot] = 0
        if (embeds := request.prompt_embeds) is not None:
            values = torch.frombuffer(bytearray(embeds.data), dtype=torch.float32)
            self.prompt_embeds[slot] = values.view(-1, embeds.width).to(self.token_ids.device)
        return slot

    def release(self, request_id: str) -> int:
        """Free the request's slot; returns it."""
        slot = self._slots.pop(request_id)
        self.prompt_embeds.pop(slot, None)
        self._free.append(slot)
        return slot

    def extend_tables(self, slots: list[int], step: SchedulerOutput) -> None:
        """Append the step's new blocks to the tables of their requests."""
        for slot, blocks_by_group in zip(slots, step.new_block_ids, strict=True):
            for group, blocks in enumerate(blocks_by_group):
                if blocks:
                    start = self._num_blocks[group, slot]
                    self.block_tables[group][slot, start : start + len(blocks)] = torch.tensor(blocks)
                    self._num_blocks[group, slot] += len(blocks)

    def append(self, slots: np.ndarray, token_ids: torch.Tensor) -> None:
        """Append one sampled token to each of these slots.

        slots: [rows] int64 on the host; token_ids: [rows] int64 on the device
        """
        device = self.token_ids.device
        places = to_device(self.num_tokens[slots], device)
        self.token_ids[to_device(slots, device), places] = token_ids
        self.num_tokens[slots] += 1
