"""Engine and front without a model: FakeExecutor, ByteTokenizer, the configs and requests they need.

FakeExecutor is a model runner whose next token is a pure function of (all tokens so far, seed), and whose KV
cache holds, instead of numbers, the identity of what was written: a digest of the whole prefix up to that
position. Before a request "attends" it checks every position it may read; so a wrong share, copy, eviction,
window or recompute fails at the step where it happens. `expected_output` says what a request must give,
without any engine.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import tokenizers

from octavo.config.cache import CacheConfig
from octavo.config.checkpoint import Checkpoint
from octavo.config.engine import EngineConfig
from octavo.config.model import ModelConfig
from octavo.config.observability import ObservabilityConfig
from octavo.config.parallel import ParallelConfig
from octavo.config.scheduling import SchedulerConfig
from octavo.engine.executor.interface import Executor
from octavo.engine.kvcache.block_pool import NULL_BLOCK, BlockPool
from octavo.frontend.requests.options import RequestOptions
from octavo.frontend.text.tokenizer import SpecialTokens, Tokenizer, byte_alphabet
from octavo.messages.kv import CachePlan, HeadsKV, KVCacheGroup, ModelReady
from octavo.messages.request import (
    EngineRequest,
    FinishReason,
    Limits,
    RequestSpec,
    Sharing,
    Standing,
    TokenLogprobs,
)
from octavo.messages.sampling import SamplingParams
from octavo.messages.step import ModelRunnerOutput, NewRequest, Place, SchedulerOutput, Tier, TokenMasks

VOCAB_SIZE = 256


def fake_config(
    *,
    block_size: int = 4,
    num_blocks: int = 64,
    max_model_len: int = 64,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    steps_in_flight: int = 1,
    enable_prefix_caching: bool = True,
    cache: dict | None = None,
    **scheduling,
) -> EngineConfig:
    """A resolved config for an engine over a FakeExecutor."""
    return EngineConfig(
        model=ModelConfig(model="fake", max_model_len=max_model_len),
        cache=CacheConfig(
            block_size=block_size,
            num_gpu_blocks_override=num_blocks,
            enable_prefix_caching=enable_prefix_caching,
            **(cache or {}),
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            steps_in_flight=steps_in_flight,
            **scheduling,
        ),
        parallel=ParallelConfig(device="cpu", distributed_executor_backend="inproc"),
        observability=ObservabilityConfig(),
        checkpoint=Checkpoint(path="fake", format="none", config={"vocab_size": VOCAB_SIZE}),
    )


def fake_groups(*windows: int, heads: tuple[int, ...] = ()) -> list[KVCacheGroup]:
    """One cache group of one layer per window; 0 = full attention. heads: of each group, 1 if not told."""
    return [
        KVCacheGroup(HeadsKV(n, 8, "float32", 64 * n, window), (i,))
        for i, (window, n) in enumerate(zip(windows, heads or [1] * len(windows), strict=True))
    ]


def fake_request(
    request_id: str,
    prompt: list[int],
    max_tokens: int = 8,
    *,
    seed: int = 0,
    eos: list[int] | None = None,
    sampling: SamplingParams | None = None,
    **fields,
) -> EngineRequest:
    """An EngineRequest as the input processor would make it."""
    sampling, eos = sampling or SamplingParams(max_tokens=max_tokens), eos or []
    standing = {"arrival_s": 0.0} | _take(fields, Standing)
    sharing = {"reads_cache": not sampling.skip_reading_prefix_cache} | _take(fields, Sharing)
    stop_token_ids = sorted({*eos, *(sampling.stop_token_ids or ())})
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        spec=RequestSpec(sampling, seed, stop_token_ids, embeds=fields.pop("embeds", None)),
        limits=Limits(max_tokens, eos, sampling.timeout_s),
        standing=Standing(**standing),
        sharing=Sharing(**sharing),
        **fields,
    )


def _take(fields: dict, kind: type) -> dict:
    return {name: fields.pop(name) for name in kind.__struct_fields__ if name in fields}


def options(arrival_s: float | None = None, **keywords) -> RequestOptions:
    """What the engines make of these keywords."""
    return RequestOptions.parse(keywords, arrival_s)


def extend_digest(digest: int, token_id: int) -> int:
    """The identity of a prefix that is longer by one token."""
    return hash((digest, token_id))


def next_token(digest: int, seed: int, forbidden=frozenset(), vocab: int = VOCAB_SIZE) -> int:
    """What the fake model says after the prefix `digest`."""
    token = hash((digest, seed)) % vocab
    while token in forbidden:
        token = (token + 1) % vocab
    return token


def masked_token(digest: int, seed: int, bits: np.ndarray) -> int:
    """The same among the tokens whose bits are set."""
    allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
    return int(allowed[hash((digest, seed)) % len(allowed)])


def expected_output(
    request: EngineRequest, max_model_len: int, vocab: int = VOCAB_SIZE
) -> tuple[list[int], FinishReason, int | None]:
    """(tokens, finish reason, stop reason) of a request that runs to its end, computed without an engine."""
    digest = 0
    for token in request.prompt_token_ids:
        digest = extend_digest(digest, token)
    sampling, limits = request.spec.sampling, request.limits
    eos, stops = set(limits.eos_token_ids), set(sampling.stop_token_ids or ())
    output: list[int] = []
    while True:
        forbidden = (eos | stops) if len(output) < sampling.min_tokens else set()
        token = next_token(digest, request.spec.seed, forbidden, vocab)
        output.append(token)
        digest = extend_digest(digest, token)
        if token in eos:
            return output, FinishReason.STOP, None
        if token in stops:
            return output, FinishReason.STOP, token
        if len(output) == limits.max_tokens or len(request.prompt_token_ids) + len(output) == max_model_len:
            return output, FinishReason.LENGTH, None


@dataclass
class _Row:
    """What the runner keeps of a request in its slot."""

    new: NewRequest
    tokens: list[int]
    digests: list[int]
    """Identity of each known prefix: digests[i] covers tokens[: i + 1]."""
    tables: list[list[int]]
    num_computed: int

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.digests.append(extend_digest(self.digests[-1] if self.digests else 0, token))


class _LazyFuture(Future):
    """Runs its step, and those before it, when its result is asked for."""

    def __init__(self, run_until) -> None:
        super().__init__()
        self._run_until = run_until

    def result(self, timeout=None):
        self._run_until(self)
        return super().result(timeout)


class FakeExecutor(Executor):
    """A runner that remembers what was written where. All checks are plain `raise`s, for `python -O`."""

    def __init__(
        self,
        groups: list[KVCacheGroup] | None = None,
        *,
        vocab_size: int = VOCAB_SIZE,
        available_bytes: int = 1 << 30,
        errors: dict[str, int] | None = None,
        fail_at_step: int = -1,
    ) -> None:
        """Fail on purpose: a request of `errors` at that output index, the engine at step `fail_at_step`."""
        self.groups = groups or fake_groups(0)
        self.vocab_size = vocab_size
        self.available_bytes = available_bytes
        self.errors = errors or {}
        self.fail_at_step = fail_at_step
        self.rows: dict[str, _Row] = {}
        self.steps: list[SchedulerOutput] = []
        """Every step executed so far."""
        self.calls: list[tuple[str, dict]] = []
        self.is_closed = False
        self._open: deque[tuple[SchedulerOutput, _LazyFuture]] = deque()
        self._unmasked: SchedulerOutput | None = None
        """The last step, while its masks are on their way."""
        self._kept_masks: dict[int, np.ndarray] = {}
        self._late_masks: dict[int, TokenMasks] = {}
        """Masks by the steps that they followed."""

    def start(self, config: EngineConfig) -> ModelReady:
        self.config = config
        return ModelReady(groups=self.groups, available_bytes=self.available_bytes)

    def allocate(self, plan: CachePlan) -> None:
        self.plan = plan
        self.memory: list[list[object]] = [
            [None] * max(plan.block_sizes) for _ in range(plan.num_blocks + plan.num_host_blocks)
        ]

    def execute(self, step: SchedulerOutput) -> Future:
        self._check(self._unmasked is None, "a step before the masks of the one before")
        self._check(not (step.masks_follow and step.token_masks), "masks twice")
        future = _LazyFuture(self._run_until)
        self._open.append((step, future))
        self._unmasked = step if step.masks_follow else None
        return future

    def sample(self, masks: TokenMasks) -> None:
        self._check(self._unmasked is not None, "masks of no step")
        self._late_masks[self._unmasked.step_id], self._unmasked = masks, None

    def call(self, verb: str, arguments: dict) -> list:
        self.calls.append((verb, arguments))
        return [verb]

    def close(self) -> None:
        self.is_closed = True

    def _run_until(self, future: _LazyFuture) -> None:
        while not future.done():
            step, oldest = self._open.popleft()
            try:
                oldest.set_result(self._run(step))
            except Exception as error:
                oldest.set_exception(error)

    def _run(self, step: SchedulerOutput) -> ModelRunnerOutput:
        if step.step_id == self.fail_at_step:
            raise RuntimeError("the fake device is gone")
        self._enter(step)
        masks = self._read_masks(step)
        for source, target in step.block_copies:
            self._check(Tier.POOL in (source.tier, target.tier), "a copy within host memory")
            self.memory[self._index(target)] = list(self.memory[self._index(source)])
        starts = [self._start(step, index) for index in range(len(step.request_ids))]
        parts = list(zip(step.request_ids, starts, step.num_scheduled_tokens, strict=True))
        for index, (request_id, start, count) in enumerate(parts):
            self._write(self.rows[request_id], start, count, step.drafts.get(index, ()))
        for request_id, start, count in parts:
            self._read(self.rows[request_id], start, count)
        output = ModelRunnerOutput(
            step_id=step.step_id, sampled_token_ids=[], logprobs={}, prompt_logprobs={}, errors={}
        )
        for index, (request_id, start, count) in enumerate(parts):
            self._sample(request_id, start, count, output, masks.get(index))
            for draft in step.drafts.get(index, ()):
                row = self.rows[request_id]
                num_output = len(row.tokens) - row.new.num_prompt_tokens
                fails = self.errors.get(request_id) in (num_output - 1, num_output)
                if output.sampled_token_ids[-1][-1] != draft or fails:
                    break
                row.num_computed += 1
                before = output.sampled_token_ids.pop()
                self._sample(request_id, start + len(before), count, output)
                output.sampled_token_ids[-1][:0] = before
        self.steps.append(step)
        return output

    def _start(self, step: SchedulerOutput, index: int) -> int:
        """Tokens computed before: of a request whose drafts were not read, only the executor knows."""
        least = step.num_computed_tokens[index]
        if index not in step.unread:
            return least
        found = self.rows[step.request_ids[index]].num_computed
        self._check(least <= found, f"{found} computed, fewer than {least}")
        return found

    def _index(self, place: Place) -> int:
        """Where the content is in `memory`: host cells lie behind the pool."""
        least, most, start = {
            Tier.POOL: (1, self.plan.num_blocks, 0),
            Tier.HOST: (0, self.plan.num_host_blocks, self.plan.num_blocks),
        }[place.tier]
        self._check(least <= place.number < most, f"{place} is null or out of range")
        return start + place.number

    def _enter(self, step: SchedulerOutput) -> None:
        """Bring the slots up to date, as a real runner does: releases first."""
        for request_id in step.released_ids:
            self._check(request_id in self.rows, f"{request_id} is released, but has no slot")
            del self.rows[request_id]
        new = {request.request_id for request in step.new_requests}
        for request in step.new_requests:
            self._check(request.request_id not in self.rows, f"{request.request_id} enters twice")
            row = _Row(request, [], [], [[] for _ in self.groups], -1)
            for token in request.token_ids:
                row.append(token)
            self.rows[request.request_id] = row
        limits = self.config.scheduler
        self._check(len(self.rows) <= limits.max_num_seqs, "more requests than slots")
        self._check(0 < step.num_tokens <= limits.max_num_batched_tokens, f"{step.num_tokens} tokens")
        self._check(new <= set(step.request_ids), "a new request has no part in the step")
        self._check(len(set(step.request_ids)) == len(step.request_ids), "a request has two parts")
        for index, request_id in enumerate(step.request_ids):
            row, start = self.rows[request_id], self._start(step, index)
            self._check(row.num_computed in (-1, start), f"{start} computed, not {row.num_computed}")
        for index, blocks in step.new_block_ids.items():
            for table, ids in zip(self.rows[step.request_ids[index]].tables, blocks, strict=True):
                table.extend(ids)

    def _write(self, row: _Row, start: int, count: int, drafts: Sequence[int] = ()) -> None:
        self._check(count > 0 and start + count <= len(row.tokens), "tokens scheduled that do not exist")
        self._check(
            not drafts or start + count == len(row.tokens), "drafts behind a token that is not the last"
        )
        digests = row.digests.copy()
        for draft in drafts:
            digests.append(extend_digest(digests[-1], draft))
        self._check(len(digests) < self.config.model.max_model_len, "drafts beyond the context")
        for table, size in zip(row.tables, self.plan.block_sizes, strict=True):
            for position in range(start, start + count + len(drafts)):
                block = table[position // size]
                self._check_block(block)
                self.memory[block][position % size] = digests[position]
        row.num_computed = start + count

    def _read(self, row: _Row, start: int, count: int) -> None:
        """Check what the queries at `start` … see."""
        for group, table, size in zip(self.groups, row.tables, self.plan.block_sizes, strict=True):
            window = group.spec.sliding_window or self.config.model.max_model_len
            for position in range(max(0, start - window + 1), start + count):
                found = self.memory[table[position // size]][position % size]
                self._check(
                    table[position // size] != 0 and found == row.digests[position],
                    f"{row.new.request_id}: position {position} of window {window} holds another's keys",
                )

    def _read_masks(self, step: SchedulerOutput) -> dict[int, np.ndarray]:
        """By place in the step: the tokens that may be chosen, as bits."""
        self._check(step is not self._unmasked, "a step is read before its masks are there")
        masks = self._late_masks.pop(step.step_id) if step.masks_follow else step.token_masks
        if masks is None or (step.masks_follow and not masks.indexes):
            return {}
        indexes = masks.indexes
        bits = np.frombuffer(masks.bits, np.uint8).reshape(-1, -(-self.vocab_size // 32) * 4)
        self._check(len(bits) == len(masks.kept_at), "masks of another vocabulary")
        self._kept_masks |= dict(zip(masks.kept_at, bits, strict=True))
        self._check(bool(indexes) and indexes == sorted(set(indexes)), f"masks of requests {indexes}")
        for index in indexes:
            end = step.num_computed_tokens[index] + step.num_scheduled_tokens[index]
            row = self.rows[step.request_ids[index]]
            self._check(end == len(row.tokens), "a mask for a request that does not sample")
        kept = [self._kept_masks[number] for number in masks.numbers]
        return dict(zip(indexes, kept, strict=True))

    def _sample(
        self,
        request_id: str,
        start: int,
        count: int,
        output: ModelRunnerOutput,
        bits: np.ndarray | None = None,
    ) -> None:
        row = self.rows[request_id]
        sampling, num_prompt = row.new.sampling, row.new.num_prompt_tokens
        if sampling.prompt_logprobs is not None and start < num_prompt - 1:
            positions = range(start + 1, min(start + count, num_prompt - 1) + 1)
            output.prompt_logprobs[request_id] = [_logprobs(row.tokens[p], p) for p in positions]
        if start + count < len(row.tokens):
            output.sampled_token_ids.append([])
            return
        index = len(row.tokens) - num_prompt
        if self.errors.get(request_id) == index:
            output.errors[request_id] = "the logits are not numbers"
        forbidden = set(row.new.spec.stop_token_ids) if index < sampling.min_tokens else set()
        token = next_token(row.digests[-1], row.new.spec.seed, forbidden, self.vocab_size)
        if bits is not None:
            token = masked_token(row.digests[-1], row.new.spec.seed, bits)
        row.append(token)
        output.sampled_token_ids.append([token])
        if sampling.logprobs is not None:
            output.logprobs[request_id] = [_logprobs(token, len(row.tokens) - 1)]

    def _check_block(self, block: int) -> None:
        self._check(0 < block < self.plan.num_blocks, f"block {block} is null or out of range")

    def _check(self, condition: bool, message: str) -> None:
        if not condition:
            raise RunnerFault(message)


def free_blocks(pool: BlockPool) -> list[int]:
    """The free blocks in the order in which they will be handed out."""
    blocks, block = [], pool._next[NULL_BLOCK]
    while block != NULL_BLOCK:
        blocks.append(block)
        block = pool._next[block]
    return blocks


class RunnerFault(AssertionError):
    """The engine asked the runner for something wrong."""


def _logprobs(token: int, position: int) -> TokenLogprobs:
    return TokenLogprobs(token_ids=[token], logprobs=[-float(position)], ranks=[1])


class ByteTokenizer(Tokenizer):
    """Every byte of UTF-8 is a token (0 … 255); 256 begins a text, 257 ends it. Nothing to download."""

    BOS, EOS = 256, 257
    CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"

    def __init__(self) -> None:
        backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=dict(byte_alphabet()), merges=[]))
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = tokenizers.decoders.ByteLevel()
        backend.add_special_tokens(["<s>", "</s>"])
        special = SpecialTokens(bos=self.BOS, eos=self.EOS, chat_templates={"default": self.CHAT_TEMPLATE})
        super().__init__(backend, special)
