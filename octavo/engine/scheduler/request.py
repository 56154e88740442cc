"""`Request`: one sequence inside the engine, from arrival to its end.

Owned by the scheduler; `update` appends to it. A request's computed tokens chase its tokens: prompt, outputs,
and outputs that were scheduled but whose values are still on the device ("pending").

    WAITING ──► RUNNING ──► FINISHED        any state ──► FINISHED
                 │   ▲
                 ▼   │
               PREEMPTED
"""

from dataclasses import dataclass, field
from enum import IntEnum, auto
from itertools import accumulate, takewhile
from math import inf

from octavo.engine.kvcache.prefix import NOTHING, HashChain
from octavo.engine.kvcache.table import BlockTable, SharedPrefix
from octavo.engine.scheduler.repetition import RepetitionDetector
from octavo.engine.speculation.guess import Guess
from octavo.engine.structured.request_matcher import RequestMatcher
from octavo.messages.media import block_identities
from octavo.messages.request import (
    DraftCounts,
    EngineRequest,
    FinishReason,
    Limits,
    RequestSpec,
    Sharing,
    Standing,
    Text,
)
from octavo.messages.sampling import RequestOutputKind, SamplingParams


class RequestStatus(IntEnum):
    """Where a request is; it is in exactly one place."""

    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    """Waiting again, without blocks; everything it had computed will be computed anew."""
    FINISHED = auto()
    """It may still be part of steps in flight; slot and blocks are freed when the last has retired, or the
    blocks are held for followers."""


_ALLOWED = {
    RequestStatus.WAITING: {RequestStatus.RUNNING, RequestStatus.FINISHED},
    RequestStatus.RUNNING: {RequestStatus.PREEMPTED, RequestStatus.FINISHED},
    RequestStatus.PREEMPTED: {RequestStatus.RUNNING, RequestStatus.FINISHED},
    RequestStatus.FINISHED: set(),
}


@dataclass(slots=True, eq=False)
class Request:
    """One sequence: what was asked, what is known, what is computed, what it holds."""

    request_id: str
    token_ids: list[int]
    """Prompt and the outputs known so far."""
    num_prompt_tokens: int
    num_given_tokens: int
    """Prompt and the outputs that came with it: what follows them is sent to the front."""
    max_total_tokens: int
    """Prompt and output together never grow beyond this."""
    spec: RequestSpec
    limits: Limits
    standing: Standing
    sharing: Sharing
    stop_token_ids: frozenset[int]
    """The spec's, for quick looks."""
    sequence: int
    """Order of arrival at this engine."""
    chain: HashChain
    max_drafts: int | None
    """Tokens that may be guessed ahead in one step; None = as many as the engine may."""
    hold: bool
    """Whether it keeps its blocks when it ends by its own tokens."""
    is_watched: bool
    """Whether somebody waits for its next token, not only for the end."""
    texts: list[Text]
    """Of a list, those that no step has taken."""
    repetition: RepetitionDetector | None = None
    matcher: RequestMatcher | None = None
    """Says which tokens may come next, once it knows the last one."""
    leader: "Request | None" = None
    """Until it first runs: the request whose blocks it may share."""
    forks_states: bool = False
    """Others wait to begin with its states behind all of its prompt but the last token."""
    status: RequestStatus = RequestStatus.WAITING
    num_computed: int = 0
    """Tokens whose keys and values are in the cache once all steps given so far have run."""
    num_in_flight: int = 0
    """Steps given to the executor and not read back."""
    last_step: int = -1
    """Number of the last step that has a part of it; kept where stages take turns."""
    num_computed_before: int = 0
    """`num_computed` when the last step that has a part of this request began; 0 when it started in it."""
    num_published: int = 0
    """Tokens of the prompt whose blocks were offered to other engines, if there are any."""
    routine_until: int = 0
    """While `num_computed` is less, its next token is routine to schedule; set by `expect_routine`."""
    guess: Guess | None = None
    """What is expected to follow, if that is of use."""
    proposal: list[int] | None = None
    """What the workers expect to follow."""
    num_unsure: int = 0
    """Drafts that steps in flight verify: so many tokens more than `num_computed` may be computed."""
    num_asked: int = 0
    """Tokens that the workers guess behind its last step."""
    table: BlockTable | None = None
    """Blocks held; None before it runs."""
    prefix: SharedPrefix | None = None
    """While it is being admitted: the beginning it will start from."""
    num_cached_tokens: int = -1
    """Prompt tokens it need not compute when it first ran; -1 before."""
    scheduled_s: float = 0.0
    """When it first ran, monotonic clock; 0 before."""
    num_preemptions: int = 0
    """Times it lost its blocks to another."""
    drafts: DraftCounts = field(default_factory=DraftCounts)
    num_overtaken: int = 0
    """Later requests that started while this one did not fit, or was worth less to the policy."""
    num_cached_blocks: int = 0
    """While it waits: leading blocks found in the cache at the last look."""
    num_prompt_logprobs: int = 0
    """Prompt positions whose logprobs were handed out."""
    finish_reason: FinishReason | None = None

    @classmethod
    def create(cls, request: EngineRequest, sequence: int, max_model_len: int, block_size: int) -> "Request":
        """Return the engine's own record of what the front asked for."""
        spec, num_prompt_tokens = request.spec, len(request.prompt_token_ids)
        num_given = len(request.given_output_ids)
        sampling = spec.task if isinstance(spec.task, SamplingParams) else None
        detection = sampling.repetition_detection if sampling else None
        return cls(
            request_id=request.request_id,
            token_ids=list(request.prompt_token_ids),
            num_prompt_tokens=num_prompt_tokens,
            num_given_tokens=num_prompt_tokens + num_given,
            max_total_tokens=min(num_prompt_tokens + request.limits.max_tokens, max_model_len),
            spec=spec,
            limits=request.limits,
            standing=request.standing,
            sharing=request.sharing,
            stop_token_ids=frozenset(spec.stop_token_ids),
            sequence=sequence,
            chain=hash_chain(request, block_size),
            max_drafts=request.max_drafts,
            hold=request.sharing.hold,
            is_watched=(
                sampling is not None
                and sampling.output_kind is not RequestOutputKind.FINAL_ONLY
                and not request.standing.in_bulk
            ),
            texts=request.texts.copy(),
            repetition=RepetitionDetector(detection) if detection and detection.max_pattern_size else None,
            num_prompt_logprobs=num_prompt_tokens - 1 if num_given else 0,
        )

    @property
    def due_s(self) -> float:
        """Return when the answer is wanted: as asked for, or the time at which it would be cut off."""
        if self.standing.due_s is not None:
            return self.standing.due_s
        return inf if self.limits.timeout_s is None else self.standing.arrival_s + self.limits.timeout_s

    @property
    def num_tokens(self) -> int:
        """Prompt and outputs, pending ones included."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_pending(self) -> int:
        """Outputs that steps in flight will bring: what computes the last token samples the next."""
        return max(0, self.num_computed + 1 - len(self.token_ids))

    @property
    def num_output_tokens(self) -> int:
        """Outputs whose values are known."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_decoding(self) -> bool:
        """Return True once its whole prompt is computed."""
        return self.num_computed >= self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        """Return True from the moment its end is known."""
        return self.status is RequestStatus.FINISHED

    # Nearly all tokens are routine: they change nothing but the lengths. These two methods say which, and the
    # scheduler and `update` take a short way for them.

    def expect_routine(self, block_size: int) -> None:
        """Find out how long steps need only compute one token and sample the next.

        Until then no block is needed or becomes full, and no limit is near.
        """
        if self.num_pending:
            assert self.table is not None
            next_full = (self.table.num_committed + 1) * block_size
            self.routine_until = min(self.table.capacity, next_full - 1, self.max_total_tokens - 1)

    def is_routine(self, token_id: int) -> bool:
        """Return True if there is nothing to tell or to ask about the next token read back but its id.

        It is not the first to be sent, and `stops.find_stop` would answer None.
        """
        return (
            self.finish_reason is None
            and self.num_given_tokens < len(self.token_ids) < self.max_total_tokens - 1
            and token_id not in self.stop_token_ids
            and (self.matcher is None or self.matcher.answer is False)
            and self.repetition is None
        )

    def next_chunk(self, most: int) -> int:
        """Return how many tokens to compute next, up to where others fork: only there are states copied."""
        num_new, ahead = self.num_tokens - self.num_computed, self.num_prompt_tokens - 1 - self.num_computed
        return min(num_new, most, ahead) if self.forks_states and ahead > 0 else min(num_new, most)

    def take_texts(self, most: int, most_tokens: int) -> list[Text]:
        """Return the next texts of a list, as many as there is room for, and those behind them no more."""
        ends = accumulate(text.num_tokens for text in self.texts[:most])
        count = sum(1 for _ in takewhile(most_tokens.__ge__, ends))
        taken, self.texts = self.texts[:count], self.texts[count:]
        return taken

    def can_lead(self, follower: "Request") -> bool:
        """Return True if this request computes all of `follower`'s prompt but its last token."""
        shared = follower.token_ids[: follower.num_prompt_tokens - 1]
        mine, others = self.chain, follower.chain
        is_alike = (mine.root, mine.change) == (others.root, others.change)
        is_alike = is_alike and mine.identities == others.identities
        return is_alike and self.token_ids[: len(shared)] == shared

    def move_to(self, status: RequestStatus) -> None:
        """Change the state; a change that the drawing above lacks is a bug of the engine."""
        if status not in _ALLOWED[self.status]:
            raise AssertionError(f"request {self.request_id}: {self.status.name} cannot become {status.name}")
        self.status = status


def hash_chain(request: EngineRequest, block_size: int) -> HashChain:
    """Return the names of the prompt's blocks; nothing is hashed yet."""
    spec, salt = request.spec, request.sharing.cache_salt
    identities = block_identities(spec.media, block_size) if spec.media else NOTHING
    return HashChain(block_size, salt, spec.cache_identity(), spec.cache_change(), identities)
