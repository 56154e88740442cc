"""Door 2: one step as the engine plans it, and what the model runner brings back."""

from enum import IntEnum
from typing import NamedTuple

import msgspec

from octavo.messages.pooling import Pooled
from octavo.messages.request import RequestSpec, RoutedTokens, Text, TokenLogprobs
from octavo.messages.sampling import SamplingParams

UNTOLD = -1
"""Stands for a draft that only the workers know."""


class NewRequest(msgspec.Struct, array_like=True, gc=False):
    """A request that (re)enters the batch; the runner gives it a row until it is released."""

    request_id: str
    token_ids: list[int]
    """Prompt, followed by the outputs known so far (after a preemption)."""
    num_prompt_tokens: int
    spec: RequestSpec
    texts: list[Text] = []
    """Of a list, the texts that this step computes; it leaves the batch with the step."""

    @property
    def prompt_ids(self) -> list[int]:
        """Return the prompt without the virtual tokens of a learned one."""
        return self.token_ids[self.spec.num_virtual_tokens : self.num_prompt_tokens]

    @property
    def sampling(self) -> SamplingParams:
        """Return how its tokens are chosen."""
        return self.spec.sampling


class TokenMasks(msgspec.Struct, array_like=True, gc=False, tag="masks"):
    """Which tokens some of a step's requests may choose."""

    indexes: list[int]
    """Places in SchedulerOutput.request_ids, ascending, all of requests that sample; may be none. With drafts
    a place comes once for each row of its request."""
    numbers: list[int]
    """Of the mask of each; requests share masks."""
    bits: bytes
    """[masks, ceil(vocab_size / 32)] int32: bit i of word w = token 32 w + i may be chosen."""
    kept_at: list[int] | None = None
    """Where to keep each of these masks: `numbers` are places in the workers' table of `num_kept_masks`, and
    masks that stand there already are not sent again. None: they count those of `bits`."""


def num_kept_masks(max_num_seqs: int) -> int:
    """Return how many masks workers keep: those of a step without drafts at least."""
    return max(1024, max_num_seqs)


class Tier(IntEnum):
    """What holds contents of blocks, and what `Place.number` counts there."""

    POOL = 0
    """Blocks, on the device."""
    HOST = 1
    """Cells of host memory."""
    STEP = 2
    """Contents that come with the step: keys of `SchedulerOutput.block_contents`."""


class Place(NamedTuple):
    """Where the content of a block is."""

    tier: Tier
    number: int


class BlockSave(msgspec.Struct, array_like=True, gc=False):
    """A block whose content is to be kept where other engines find it, under (digest, group)."""

    block: int
    digest: bytes
    group: int


class SchedulerOutput(msgspec.Struct, array_like=True, gc=False, tag="step"):
    """One step. The lists from `request_ids` to `num_scheduled_tokens` run in parallel, an entry per request.

    A request samples in this step when computed + scheduled reaches its number of tokens; the runner keeps
    sampled tokens itself, so they are not sent down again. Order within a step: releases, new requests, block
    copies; then in each layer all keys and values are written before any are read, for requests of one step
    may share blocks.
    """

    step_id: int
    new_requests: list[NewRequest]
    released_ids: list[str]
    """Requests that left the batch (finished or preempted) since the last step: their rows are free."""
    request_ids: list[str]
    num_computed_tokens: list[int]
    num_scheduled_tokens: list[int]
    new_block_ids: dict[int, list[list[int]]]
    """By place in `request_ids`, for those that get some, by group: block ids to append to the table; who
    (re)enters gets the whole table."""
    block_copies: list[tuple[Place, Place]]
    """(from, to): whole blocks to copy in all layers, in this order, before anything is computed."""
    token_masks: TokenMasks | None = None
    masks_follow: bool = False
    """What may be chosen depends on tokens still on the device: compute, and sample when TokenMasks come.
    The next step is given only after that."""
    block_contents: dict[int, list[bytes]] = {}
    """Contents that `block_copies` copy into blocks; of each a part per rank."""
    drafts: dict[int, list[int]] = {}
    """By place in `request_ids`: tokens guessed to follow the one scheduled. A row of the step computes each
    as if it were known, and all rows of the request sample. UNTOLD: what the workers guessed there."""
    block_saves: list[BlockSave] = []
    """Blocks to keep, as they are after this step."""
    num_drafts: list[int] = []
    """By place in `request_ids`: tokens that the workers shall guess behind what is sampled; [] = none."""
    tells_drafts: bool = True
    """What they guess comes with the result; otherwise a later step names it by UNTOLD."""
    unread: list[int] = []
    """Places in `request_ids` of which the step before verifies drafts, and was not read when this one was
    planned: as many tokens more are computed as drafts came true."""
    num_taken: dict[int, int] = {}
    """By place in `request_ids`: drafts that count as true, whether they are or not; the next one is not."""

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(self.num_scheduled_tokens) + sum(map(len, self.drafts.values()))


class ModelRunnerOutput(msgspec.Struct, array_like=True, gc=False, tag="result"):
    """What a step brought; the lists run parallel to SchedulerOutput.request_ids."""

    step_id: int
    sampled_token_ids: list[list[int]]
    """Empty for a request that did not sample; the drafts that came true and one more."""
    logprobs: dict[str, list[TokenLogprobs]] = {}
    prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
    errors: dict[str, str] = {}
    """Requests that cannot go on (not-a-number logits …), with the text for the client."""
    pooled: dict[str, Pooled] = {}
    """Results of requests that are complete without a token."""
    drafts: dict[int, list[int]] = {}
    """By place: tokens guessed to follow the last one sampled."""
    num_drafts: list[int] = []
    """Drafts of each request, without those that were asked for and not found; [] = as was planned."""
    draft_s: float = 0.0
    """Seconds that guessing took."""
    num_encoded: int = 0
    """Images and the like that the step has encoded, together."""
    routes: dict[str, list[RoutedTokens]] = {}
    """Which experts took the tokens of each request that are computed, if that is told."""
