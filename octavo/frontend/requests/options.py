"""`RequestOptions`: what a request asks for beside its prompt and its sampling parameters, parsed once.

`RequestKeywords` are the public keywords of every method that starts requests. The engines parse them where
they are called; the input processor gets the result. A new option is a keyword, a field and its check, here.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Literal, TypedDict, TypeVar, cast, get_args

from octavo.base.errors import RequestError, wrong
from octavo.config.cache import CacheConfig
from octavo.config.speculative import MAX_DRAFTS
from octavo.messages import sampling_values as read
from octavo.messages.adapters import LoRARequest, LoRASum, PromptAdapterRequest
from octavo.messages.request import Retention, Standing

T = TypeVar("T")
Side = Literal["left", "right"]
DEFAULT_RETENTION_S = 300.0


@dataclass(frozen=True, slots=True)
class TokenizationOptions:
    """What `tokenization_kwargs` may say."""

    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    """Keep this many tokens; -1 = as many as leave room for max_tokens."""
    truncation_side: Side = "left"
    """The side that is cut off."""
    max_output_tokens: int = 0
    """Refuse a prompt that leaves less room than this; otherwise max_tokens is cut to the room there is."""

    @classmethod
    def parse(cls, options: Mapping[str, Any] | None) -> "TokenizationOptions":
        """Raises RequestError for an unknown name or a value out of range."""
        known = cls.__slots__
        if unknown := sorted(set(options or ()) - set(known)):
            raise RequestError(
                f"Unknown tokenization_kwargs {', '.join(unknown)}. Known: {', '.join(known)}.",
                "tokenization_kwargs",
            )
        parsed = cls(**(options or {}))
        keep = parsed.truncate_prompt_tokens
        if keep is not None and (type(keep) is not int or keep < 1) and keep != -1:
            raise wrong("truncate_prompt_tokens", f"must be -1 or at least 1, got {keep!r}")
        if parsed.truncation_side not in get_args(Side):
            raise wrong("truncation_side", f"must be left or right, got {parsed.truncation_side!r}")
        return parsed


class RequestKeywords(TypedDict, total=False):
    """Keywords of every method that starts requests. `LLM` takes lists of some: one value for each prompt."""

    priority: int | Sequence[int] | None
    """For the scheduling policy "priority": smaller goes first. LLM: one for all prompts, or a list."""
    tenant: str | Sequence[str] | None
    """Whom the scheduling policy "fair" charges. LLM: one for all prompts, or a list."""
    deadline_s: float | Sequence[float | None] | None
    """Seconds after arrival in which the answer is wanted, for the policy "deadline". LLM: one, or a list."""
    in_bulk: bool
    """One of many that nobody waits for singly: together they leave half of max_num_seqs to others."""
    speculative: bool | Mapping[str, int] | None
    """False, or {"num_tokens": N}: guess none, or at most N tokens ahead; else as speculative_config says."""
    tokenization_kwargs: Mapping[str, Any] | None
    """Fields of TokenizationOptions."""
    trace_headers: Mapping[str, str] | None
    """`traceparent` and `tracestate`, the caller's place in a trace (otlp_traces_endpoint)."""
    lora_request: LoRARequest | LoRASum | Sequence[LoRARequest | LoRASum | None] | None
    """The adapter to answer with, or a sum of some (enable_lora). LLM: one for all prompts, or a list."""
    prompt_adapter_request: PromptAdapterRequest | Sequence[PromptAdapterRequest | None] | None
    """The learned prompt before the request's own (enable_prompt_adapter). LLM: one for all, or a list."""
    mm_processor_kwargs: Mapping[str, Any] | None
    """Entries that replace those of the model's preprocessor_config.json, for the images of this request."""
    retention_s: float | None
    """Seconds that the prompt stays in the prefix cache after its last use (prefix_pin_share)."""
    prefix_priority: int | None
    """0 … 99: where not all such prompts can stay, the least goes first. Alone: retention_s is 300."""
    retention_tokens: int | None
    """How much of the prompt stays, from its beginning; None = all. Only beside one of the two before."""
    data_parallel_rank: int | None
    """The replica that is to serve it; None = the one that can begin first."""
    kv_transfer_params: Mapping[str, Any] | None
    """Where its prompt has been computed, or that another engine goes on with it (kv_transfer_config)."""


KEYWORDS = frozenset(RequestKeywords.__annotations__)
_PER_PROMPT = ("priority", "tenant", "deadline_s", "lora_request", "prompt_adapter_request")


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The keywords of one request, checked."""

    priority: int = 0
    tenant: str = ""
    deadline_s: float | None = None
    in_bulk: bool = False
    lora_request: LoRARequest | LoRASum | None = None
    prompt_adapter_request: PromptAdapterRequest | None = None
    max_drafts: int | None = None
    """Tokens guessed ahead in one step; None = as many as the engine may."""
    arrival_s: float | None = None
    """Monotonic; None: when its engine requests are made."""
    tokenization: TokenizationOptions = TokenizationOptions()
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    data_parallel_rank: int | None = None
    retention: Retention | None = None
    mm_processor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    kv_transfer_params: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if type(self.priority) is not int or not -(2**31) <= self.priority < 2**31:
            raise wrong("priority", f"must be an integer of 32 bits, got {self.priority!r}")
        if not isinstance(self.tenant, str) or not self.tenant.isprintable():
            raise wrong("tenant", f"must be a printable string, got {self.tenant!r}")
        if not isinstance(self.lora_request, LoRARequest | LoRASum | None):
            raise wrong(
                "lora_request", f"must be a LoRARequest or a LoRASum, got {type(self.lora_request).__name__}"
            )
        if not isinstance(self.prompt_adapter_request, PromptAdapterRequest | None):
            raise wrong(
                "prompt_adapter_request",
                f"must be a PromptAdapterRequest, got {type(self.prompt_adapter_request).__name__}",
            )
        if not isinstance(self.in_bulk, bool):
            raise wrong("in_bulk", f"must be True or False, got {self.in_bulk!r}")
        if self.deadline_s is not None and read.number(self.deadline_s, "deadline_s") <= 0:
            raise wrong("deadline_s", f"must be greater than zero, got {self.deadline_s}")

    @classmethod
    def parse(cls, keywords: RequestKeywords, arrival_s: float | None = None) -> "RequestOptions":
        """Raises TypeError for an unknown keyword, RequestError for a wrong value, Unsupported."""
        given = cast(dict[str, Any], keywords)
        if unknown := sorted(set(given) - KEYWORDS):
            raise TypeError(
                f"unexpected keyword argument {unknown[0]!r}: a request takes {', '.join(sorted(KEYWORDS))}"
            )
        return cls(
            **{name: given[name] for name in (*_PER_PROMPT, "in_bulk") if name in given},
            max_drafts=_max_drafts(given.get("speculative")),
            arrival_s=arrival_s,
            tokenization=TokenizationOptions.parse(keywords.get("tokenization_kwargs")),
            trace_headers=keywords.get("trace_headers") or {},
            data_parallel_rank=keywords.get("data_parallel_rank"),
            retention=read_retention(
                keywords.get("retention_s"), keywords.get("prefix_priority"), keywords.get("retention_tokens")
            ),
            mm_processor_kwargs=keywords.get("mm_processor_kwargs") or {},
            kv_transfer_params=keywords.get("kv_transfer_params") or {},
        )

    @classmethod
    def parse_each(cls, keywords: RequestKeywords, count: int) -> "list[RequestOptions]":
        """Return the options of `count` prompts; errors as in `parse`."""
        given = cast(dict[str, Any], keywords)
        columns = {name: given[name] for name in _PER_PROMPT if _is_listed(given.get(name))}
        listed = {name: per_prompt(name, values, count) for name, values in columns.items()}
        shared = {n: value for n, value in given.items() if n not in columns and value is not None}
        common = cls.parse(cast(RequestKeywords, shared))
        if not listed:
            return [common] * count
        return [replace(common, **{name: values[i] for name, values in listed.items()}) for i in range(count)]

    def standing(self) -> Standing:
        """Return where the request stands among the others, from its arrival on."""
        arrival_s = time.monotonic() if self.arrival_s is None else self.arrival_s
        due_s = None if self.deadline_s is None else arrival_s + self.deadline_s
        rank = self.data_parallel_rank
        return Standing(arrival_s, self.priority, self.tenant, due_s, self.in_bulk, rank)

    def kept(self, cache: CacheConfig) -> Retention | None:
        """Return how long the prompt stays in the cache. Raises RequestError if nothing is kept there."""
        if self.retention is not None and not cache.enable_prefix_caching:
            raise RequestError(
                "retention_s keeps prompts in the prefix cache, which enable_prefix_caching=False turns off.",
                "retention_s",
            )
        return self.retention

    def check_rank(self, num_replicas: int) -> None:
        """Raise RequestError unless the rank, if there is one, is that of a replica."""
        rank = self.data_parallel_rank
        if rank is not None and (type(rank) is not int or not 0 <= rank < num_replicas):
            text = f"data_parallel_rank {rank} is out of range [0, {num_replicas})."
            raise RequestError(text, "data_parallel_rank")


def read_retention(seconds: object, priority: object, num_tokens: object = None) -> Retention | None:
    """Return what the keywords ask for; None for nothing. Raises RequestError."""
    if num_tokens is not None and (type(num_tokens) is not int or num_tokens < 0):
        raise wrong("retention_tokens", f"must be a whole number of tokens, got {num_tokens!r}")
    if seconds is None and priority is None:
        return None
    seconds = DEFAULT_RETENTION_S if seconds is None else read.number(seconds, "retention_s")
    if not 0 < seconds < inf:
        raise wrong("retention_s", f"must be greater than zero and finite, got {seconds}")
    priority = 0 if priority is None else priority
    if type(priority) is not int or not 0 <= priority <= 99:
        raise wrong("prefix_priority", f"must be a whole number from 0 to 99, got {priority!r}")
    return Retention(float(seconds), priority, num_tokens=num_tokens)


def _max_drafts(given: object) -> int | None:
    """Return what `speculative` allows. Raises RequestError for anything but its two forms."""
    if given is None or given is True:
        return None
    if given is False:
        return 0
    count = given.get("num_tokens") if isinstance(given, Mapping) and len(given) == 1 else None
    if type(count) is not int or not 0 <= count <= MAX_DRAFTS:
        allowed = f'true, false, or {{"num_tokens": N}} with N from 0 to {MAX_DRAFTS}'
        raise wrong("speculative", f"must be {allowed}, got {given!r}")
    return count


def _is_listed(value: object) -> bool:
    """Return True for one value per prompt, False for one for all."""
    return isinstance(value, Iterable) and not isinstance(value, str)


NO_OPTIONS = RequestOptions()


def per_prompt(name: str, values: Iterable[T], count: int) -> list[T]:
    """Return one value for each of `count` prompts. Raises RequestError when there are more or fewer."""
    listed = list(values)
    if len(listed) != count:
        raise RequestError(
            f"The lengths of prompts ({count}) and {name} ({len(listed)}) must be the same.", name
        )
    return listed


def split_keywords(options: Mapping[str, Any]) -> tuple[RequestKeywords, dict[str, Any]]:
    """Return the request's keywords, and all others."""
    keywords = {name: value for name, value in options.items() if name in KEYWORDS}
    others = {name: value for name, value in options.items() if name not in KEYWORDS}
    return cast(RequestKeywords, keywords), others
