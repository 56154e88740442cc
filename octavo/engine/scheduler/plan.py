"""`StepPlan`: one step while it is planned, and what `update` needs to read its result.

Filled by the scheduler; rules look at it. `to_output` is the form in which it goes to the workers.
"""

import sys
from dataclasses import dataclass, field

from octavo.config.scheduling import SchedulerConfig
from octavo.engine.scheduler.encoder_budget import EncoderBudget
from octavo.engine.scheduler.request import Request
from octavo.engine.structured.request_matcher import RequestMatcher
from octavo.messages.step import NewRequest, Place, SchedulerOutput, TokenMasks

LONGEST_PART = 512
"""Where a step takes little longer per token than one of many more."""


@dataclass(slots=True, eq=False)
class StepPlan:
    """Who computes how many tokens. The lists from `requests` to `num_scheduled` run in parallel."""

    step_id: int
    num_tokens_left: int
    """Of the step's token budget."""
    num_seats_left: int
    """Requests that may still start."""
    longest_chunk: int = 0
    """Tokens that one request may compute."""
    encoder: EncoderBudget = field(default_factory=lambda: EncoderBudget(0))
    num_tokens_cut: int = 0
    """Of the budget, for the sake of those who watch their tokens come."""
    longest_part: int = sys.maxsize
    """Of a prompt that another engine goes on with: it gets each part while the next is computed."""
    is_paced: bool = False
    """What may have to be cut has been."""
    is_short_of_blocks: bool = False
    """A running request had to take blocks from another: nothing starts in this step."""
    is_blocked: bool = False
    """A running request still waits for blocks: those behind it get none."""
    new_requests: list[NewRequest] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    num_computed: list[int] = field(default_factory=list)
    num_scheduled: list[int] = field(default_factory=list)
    new_blocks: dict[int, list[list[int]]] = field(default_factory=dict)
    """By place in `requests`, for those that got some."""
    drafts: dict[int, list[int]] = field(default_factory=dict)
    """By place in `requests`: tokens guessed to follow."""
    num_drafts: list[int] = field(default_factory=list)
    """By place in `requests`: tokens that the workers shall guess behind this step; [] = none."""
    tells_drafts: bool = True
    unread: list[int] = field(default_factory=list)
    """Both as in SchedulerOutput."""
    num_taken: dict[int, int] = field(default_factory=dict)
    """By place in `requests`: drafts that count as true, whether they are or not."""
    matchers_ahead: dict[int, list[RequestMatcher]] = field(default_factory=dict)
    """The matchers behind these tokens."""
    constrained: list[tuple[int, Request]] = field(default_factory=list)
    """Those that have a matcher, with their places in `requests`."""

    @classmethod
    def of(cls, config: SchedulerConfig, step_id: int, num_seats_left: int, longest_chunk: int) -> "StepPlan":
        """Return an empty step."""
        budget = config.max_num_batched_tokens
        splits = config.enable_chunked_prefill
        encoder = EncoderBudget(budget if splits else sys.maxsize)
        longest_part = LONGEST_PART if splits else sys.maxsize
        return cls(step_id, budget, num_seats_left, longest_chunk, encoder, longest_part=longest_part)

    def add(self, request: Request, num_new: int, new_blocks: list[list[int]] | None = None) -> None:
        """Give `request` a part of `num_new` tokens, and count them as computed from here on."""
        if new_blocks:
            self.new_blocks[len(self.requests)] = new_blocks
        num_computed = request.num_computed
        self.requests.append(request)
        self.num_computed.append(num_computed)
        self.num_scheduled.append(num_new)
        self.num_tokens_left -= num_new
        request.num_computed_before = num_computed
        request.num_computed = num_computed + num_new
        request.num_in_flight += 1
        if request.matcher is not None and request.num_computed >= len(request.token_ids):
            self.constrained.append((len(self.requests) - 1, request))

    def add_texts(self, request: Request) -> int:
        """Give as many texts of a list as fit a part, and seats for this step alone; return their tokens."""
        texts = request.take_texts(self.num_seats_left, self.num_tokens_left)
        start, num_new = request.num_computed, sum(text.num_tokens for text in texts)
        token_ids = request.token_ids[start : start + num_new]
        self.new_requests.append(NewRequest(request.request_id, token_ids, num_new, request.spec, texts))
        self.num_seats_left -= len(texts)
        self.add(request, num_new)
        return num_new

    def next_chunk(self, request: Request, most: int) -> int:
        """Return how many tokens of `request` to compute now, about `most`; 0 if it has to wait."""
        if request.sharing.target is not None:
            most = min(most, self.longest_part)
        num_new, computed = request.next_chunk(most), request.num_computed
        if not request.spec.media or request.is_decoding:
            return num_new
        longest = min(self.longest_chunk, self.num_tokens_left + self.num_tokens_cut)
        return (
            self.encoder.cut(request.spec.media, computed, computed + num_new, computed + longest) - computed
        )

    def add_drafts(self, request: Request, drafts: list[int], matchers: list[RequestMatcher]) -> None:
        """Verify `drafts` in rows behind the token of `request`, which is added next."""
        self.drafts[len(self.requests)] = drafts
        self.matchers_ahead[len(self.requests)] = matchers
        self.num_tokens_left -= len(drafts)
        request.num_unsure += len(drafts)

    @property
    def awaits_tokens(self) -> bool:
        """Return True if matchers must see tokens of steps in flight before they can mask this step."""
        return any(
            request.num_computed > len(request.token_ids) and not request.is_finished
            for _, request in self.constrained
        )

    def matchers(self) -> list[tuple[int, RequestMatcher]]:
        """Return the matchers of requests that have not ended meanwhile, with their places in `requests`.

        Behind that of a request stand those of its drafts.
        """
        return [
            (place, matcher)
            for place, request in self.constrained
            if request.matcher is not None and not request.is_finished
            for matcher in (request.matcher, *self.matchers_ahead.get(place, ()))
        ]

    def to_output(
        self, released_ids: list[str], block_copies: list[tuple[Place, Place]], token_masks: TokenMasks | None
    ) -> SchedulerOutput:
        """Return the step as the workers get it."""
        return SchedulerOutput(
            step_id=self.step_id,
            new_requests=self.new_requests,
            released_ids=released_ids,
            request_ids=[request.request_id for request in self.requests],
            num_computed_tokens=self.num_computed,
            num_scheduled_tokens=self.num_scheduled,
            new_block_ids=self.new_blocks,
            block_copies=block_copies,
            token_masks=token_masks,
            masks_follow=self.awaits_tokens,
            drafts=self.drafts,
            num_drafts=self.num_drafts,
            tells_drafts=self.tells_drafts,
            unread=self.unread,
            num_taken=self.num_taken,
        )
