"""Door 1: what the front sends to the core, and what comes back."""

from enum import StrEnum
from hashlib import sha256

import msgspec

from octavo.messages.adapters import AdapterRef, SoftPromptRef
from octavo.messages.media import MediaItem, Source
from octavo.messages.pooling import Pooled, PoolingParams
from octavo.messages.sampling import SamplingParams
from octavo.messages.structured import Constraint


class FinishReason(StrEnum):
    """Why a request ended; every accepted request ends with exactly one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    TIMEOUT = "timeout"
    REPETITION = "repetition"


class PromptEmbeds(msgspec.Struct, array_like=True, gc=False):
    """A prompt as vectors that stand in for the embeddings of its tokens."""

    data: bytes
    """[rows, width] float32, row by row; one row for each of the first tokens."""
    width: int


class RequestSpec(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Everything that the workers must know about a request; carried whole from the front to them."""

    task: SamplingParams | PoolingParams
    seed: int
    """Key of the sampling noise together with the output position; 0 ≤ seed < 2**63."""
    stop_token_ids: list[int] = []
    """End of text and the user's stop tokens together, ascending: what `min_tokens` forbids."""
    embeds: PromptEmbeds | None = None
    """Computed in the place of the embeddings of the prompt's first tokens, whose ids then mean nothing."""
    pair_start: int = 0
    """Position from which tokens are of the second text of a pair; 0 = there is one text."""
    num_instruction_tokens: int = 0
    """Leading tokens that a mean leaves out, where the model wants that."""
    adapter: AdapterRef | None = None
    """What changes the model for this request."""
    soft_prompt: SoftPromptRef | None = None
    """What stands before its own prompt."""
    media: list[MediaItem] = []
    """Images and the like, in the order of their places."""
    source: Source | None = None
    """Of an encoder-decoder: what its encoder reads."""

    @property
    def num_virtual_tokens(self) -> int:
        """Return how many of its first tokens are those of a learned prompt."""
        return 0 if self.soft_prompt is None else self.soft_prompt.num_tokens

    @property
    def sampling(self) -> SamplingParams:
        """Return how tokens are chosen; only for requests that generate."""
        assert isinstance(self.task, SamplingParams)
        return self.task

    @property
    def adapter_paths(self) -> list[str]:
        """Return the folders of its adapters."""
        parts = () if self.adapter is None else self.adapter.parts
        return [*(part.path for part in parts), *([self.soft_prompt.path] if self.soft_prompt else ())]

    def cache_identity(self) -> bytes:
        """Return what the keys and values of the whole prompt depend on beside its token ids."""
        given = b"" if self.embeds is None else b"prompt_embeds" + sha256(self.embeds.data).digest()
        if self.soft_prompt is not None:
            given += b"soft_prompt" + self.soft_prompt.key
        if self.source is not None:
            given += b"source" + self.source.key
        position, changes = self.cache_change()
        return given if position else given + changes

    def cache_change(self) -> tuple[int, bytes]:
        """Return what they depend on from a position on, and that position; before it they are the base's."""
        return (0, b"") if self.adapter is None else (self.adapter.start, b"adapter" + self.adapter.key)


class Limits(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """When the engine ends a request, whatever the workers bring."""

    max_tokens: int
    """Most output tokens; prompt + max_tokens fit the context."""
    eos_token_ids: list[int] = []
    """End of text; empty when the request ignores it."""
    timeout_s: float | None = None
    """Seconds from the arrival to its end by force."""


class Standing(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Where a request stands among the others; the scheduling policy decides which of it counts."""

    arrival_s: float
    """Monotonic clock of the front's machine."""
    priority: int = 0
    tenant: str = ""
    """Whom the computed tokens are charged to, where shares are fair."""
    due_s: float | None = None
    """Monotonic time by which the answer is wanted, where the earliest deadline goes first."""
    in_bulk: bool = False
    """One of many that nobody waits for singly: together they leave half of the seats to others."""
    data_parallel_rank: int | None = None
    """The replica that is to serve it; None = any."""


class Retention(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """How long a beginning is to stay in the cache, and what it is worth there."""

    seconds: float
    """Since it was last used."""
    priority: int = 0
    """0 … 99; where not all can stay, the least goes first."""
    is_firm: bool = False
    """Made by an operator: it goes after all that requests left behind."""
    num_tokens: int | None = None
    """Of the prompt, from its beginning; None = all."""


class KVSource(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """An engine that serves the keys and values of a prompt over TCP."""

    host: str
    port: int
    engine_id: str = ""
    request_id: str = ""
    num_blocks: int = 0
    """Of the prompt, counted in the least that can be passed on."""
    num_ranks: int = 1


class Sharing(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Which blocks a request may take over from others, and leave to them."""

    cache_salt: str = ""
    """Only requests of the same salt share."""
    reads_cache: bool = True
    """Whether it may start from a beginning that the prefix cache has."""
    leader_id: str = ""
    """The request whose blocks this one shares once they are computed: its tokens begin with all of this
    prompt but the last token. For the children of n > 1, and for the next tokens of a beam."""
    hold: bool = False
    """Keep the blocks after its own end, for followers, until it is aborted or the blocks are needed."""
    retention: Retention | None = None
    """Keep the prompt in the cache after its own end; None: as long as nothing else wants the blocks."""
    source: KVSource | None = None
    """Where its prompt has been computed."""
    target: KVSource | None = None
    """The engine that goes on with its prompt, and is given the blocks if it has a port; the end tells where
    they are found."""


class Text(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """One of the texts of a list: how many tokens it has, and what RequestSpec says of a single one."""

    num_tokens: int
    pair_start: int = 0
    num_instruction_tokens: int = 0


class EngineRequest(msgspec.Struct, array_like=True, gc=False, tag="add"):
    """One sequence to generate. The input processor has checked all limits and filled in all defaults."""

    request_id: str
    """Unique in the engine; made by the front, never by a client."""
    prompt_token_ids: list[int]
    spec: RequestSpec
    limits: Limits
    standing: Standing
    sharing: Sharing = Sharing()
    constraint: Constraint | None = None
    """The form that the output must have."""
    front: int = 0
    """Who gets the outputs."""
    given_output_ids: list[int] = []
    """Output tokens that it has already; the engine goes on behind them and does not send them again."""
    max_drafts: int | None = None
    """Tokens that may be guessed ahead in one step; None = as many as the engine may."""
    texts: list[Text] = []
    """Of a list of texts, whose tokens are one behind the other: only for models that read a text in one step
    and keep nothing of it. Steps take as many as fit, each with results for them. [] = there is one text."""


class TokenLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Logprobs at one position: the chosen token first, then the most likely ones in order.

    token_ids, logprobs, ranks: same length; rank 1 = most likely.
    """

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


class RoutedTokens(msgspec.Struct, array_like=True, gc=False):
    """The experts that took some neighbouring tokens.

    start: position of the first; ids: [tokens, layers, top_k] unsigned integers of `num_bytes` each
    """

    start: int
    ids: bytes
    layers: int
    top_k: int
    num_bytes: int


class DraftCounts(msgspec.Struct, array_like=True, gc=False):
    """What was guessed of one sequence, and came true."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    by_accepted: dict[int, int] = {}
    """Drafts, by how many of their tokens came true."""

    def note(self, num_tokens: int, num_accepted: int) -> None:
        """Count a draft."""
        self.num_drafts += 1
        self.num_draft_tokens += num_tokens
        self.by_accepted[num_accepted] = self.by_accepted.get(num_accepted, 0) + 1


class EngineOutput(msgspec.Struct, array_like=True, gc=False):
    """What one step brought for one request."""

    request_id: str
    new_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    """One entry per new token, when asked for."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Entries for prompt positions 1 …, as chunks are computed, when asked for."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token that ended it; None for end of text."""
    num_cached_tokens: int = 0
    """Until the first token: prompt tokens found in the prefix cache."""
    error: str = ""
    """For FinishReason.ERROR: a text for the client."""
    scheduled_s: float = 0.0
    """Until the first token: when it first took part in a step, monotonic clock; 0 = never."""
    num_preemptions: int = 0
    """In the end: times it lost its blocks to another."""
    ended_by_text: bool = False
    """For FinishReason.STOP: the last token completed the output and is part of its text."""
    num_cache_creation_tokens: int = 0
    """Until the first token: prompt tokens that it computed and the prefix cache keeps."""
    pooled: Pooled | None = None
    """The result of a request that generates nothing, with FinishReason.STOP; of a list, those of its next
    texts."""
    weight_version: str = ""
    """Of the weights that made the tokens; empty for those of the start."""
    source: KVSource | None = None
    """In the end: where another engine finds its prompt, if that was asked for."""
    routes: list[RoutedTokens] | None = None
    """Which experts took tokens that are computed, if that is told."""
    drafts: DraftCounts | None = None
    """In the end: what was guessed of it."""

    @classmethod
    def failed(cls, request_id: str, error: str) -> "EngineOutput":
        """Return the end of a request that could not go on."""
        return cls(request_id, [], finish_reason=FinishReason.ERROR, error=error)


class SchedulerStats(msgspec.Struct, array_like=True, gc=False):
    """The engine's state after a step."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks_used: int = 0
    num_blocks: int = 0
    num_preemptions: int = 0
    """Since the start, as are all that follow."""
    prefix_queries: int = 0
    prefix_hits: int = 0
    num_steps: int = 0
    num_timeouts: int = 0
    num_blocks_swapped_out: int = 0
    """Blocks whose content was copied to host memory."""
    num_blocks_swapped_in: int = 0
    external_queries: int = 0
    """Tokens looked up in what other engines keep; below, those brought from there."""
    external_hits: int = 0
    num_drafts: int = 0
    """Times that tokens were guessed ahead for a request; below, those tokens, and those that came true."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_by_position: list[int] = []
    """The same by place in the draft."""
    num_dropped: int = 0
    """Messages to the core that were not requests, or requests whose id was in use."""
    num_blocks_pinned: int = 0
    """Held for beginnings that are to stay (engine/kvcache/pins)."""
    num_encodings: int = 0
    """Steps that encoded images and the like; below, how many of these."""
    num_encoded: int = 0
    has_work: bool = False
    """Whether a step is due: there are requests, and the engine is not paused."""
    weight_version: str = ""
    """Of the weights in use; below, where they can be read: what the next core begins with."""
    weight_path: str = ""


class EngineOutputs(msgspec.Struct, array_like=True, gc=False, tag="outputs"):
    """Everything one step brought to a front. Without outputs, twice a second at least, a sign of life."""

    outputs: list[EngineOutput]
    stats: SchedulerStats
    engine: int = 0
    """The replica that sent it; the front enters it."""
    life: int = 0
    """Of the core that sent it, as in its Ready."""
