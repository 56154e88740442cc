"""`SamplingParams`: what a user asks of one request. Public, and part of the messages.

Names, defaults, rules and texts follow vLLM's class of the same name; the exceptions are marked "octavo".
Rules that need the model (vocabulary, context) are checked by the input processor.
"""

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import msgspec

from octavo.base.errors import RequestError

GREEDY_BELOW = 1e-5
LOWEST_TEMPERATURE = 1e-2
MAX_N = 16384
MAX_SEED = 2**63 - 1


class RequestOutputKind(IntEnum):
    """What each output of a stream carries."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingParams(msgspec.Struct, omit_defaults=True, dict=False):
    """How the tokens of one request are chosen and when it ends. Raises RequestError for a value out of range."""

    n: int = 1
    """Sequences for one prompt; sequence i uses seed + i. Must be 1 when greedy."""
    presence_penalty: float = 0.0
    """-2 … 2; subtracted once from every token that the output has."""
    frequency_penalty: float = 0.0
    """-2 … 2; subtracted per occurrence in the output."""
    repetition_penalty: float = 1.0
    """> 0; divides positive and multiplies negative logits of tokens in prompt and output."""
    temperature: float = 1.0
    """0 … 2; 0 is greedy."""
    top_p: float = 1.0
    """0 < top_p ≤ 1; keep the likeliest tokens whose probabilities reach top_p."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 or -1 = all."""
    min_p: float = 0.0
    """0 … 1; keep tokens at least min_p times as likely as the likeliest."""
    seed: int | None = None
    """Key of the noise; the same seed gives the same tokens however requests are batched. -1 = None."""
    stop: str | list[str] | None = None
    """Strings that end the output."""
    stop_token_ids: list[int] | None = None
    """Tokens that end the output, kept in token_ids and left out of the text."""
    bad_words: list[str] | None = None
    """Words whose token sequences are never completed."""
    ignore_eos: bool = False
    max_tokens: int | None = 16
    """Most output tokens; None = the rest of the context."""
    min_tokens: int = 0
    """No end of text and no stop token before this many output tokens."""
    logprobs: int | None = None
    """Logprobs of this many likeliest tokens per output position, besides the chosen one; -1 = the vocabulary."""
    prompt_logprobs: int | None = None
    """The same for every prompt position but the first."""
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logit_bias: dict[int, float] | None = None
    """Added to the logits of these tokens; -100 … 100."""
    allowed_token_ids: list[int] | None = None
    forbidden_token_ids: list[int] | None = None
    """Never chosen (octavo)."""
    skip_reading_prefix_cache: bool | None = None
    """Compute the whole prompt; None = only when prompt_logprobs are asked for."""
    extra_args: dict[str, Any] | None = None
    bad_words_token_ids: list[list[int]] | None = None
    """`bad_words` as token sequences; filled by the input processor, not by users."""

    def __post_init__(self) -> None:
        self._normalise()
        self._check_counts()
        self._check_floats()
        self._check_lists()

    @property
    def greedy(self) -> bool:
        """True when the likeliest token is always chosen."""
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        return self.stop if isinstance(self.stop, list) else []

    def clone(self) -> "SamplingParams":
        """A copy that shares nothing mutable that octavo changes."""
        return msgspec.structs.replace(self)

    def _normalise(self) -> None:
        self.temperature = _number(self.temperature, "temperature")
        if self.seed == -1:
            self.seed = None
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        if self.logprobs is True:
            self.logprobs = 1
        if self.prompt_logprobs is True:
            self.prompt_logprobs = 1
        if GREEDY_BELOW <= self.temperature < LOWEST_TEMPERATURE:
            self.temperature = LOWEST_TEMPERATURE
        if self.temperature < GREEDY_BELOW and self.temperature >= 0:
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0
        if self.skip_reading_prefix_cache is None:
            self.skip_reading_prefix_cache = self.prompt_logprobs is not None
        if self.stop_token_ids:
            self.stop_token_ids = list(dict.fromkeys(self.stop_token_ids))
        if self.logit_bias:
            self.logit_bias = {
                _integer(k, "logit_bias"): min(100.0, max(-100.0, _number(v, "logit_bias")))
                for k, v in self.logit_bias.items()
            }

    def _check_counts(self) -> None:
        _bounded(self.n, "n", 1, MAX_N)
        if self.n > 1 and self.greedy:
            raise RequestError(f"n must be 1 when using greedy sampling, got {self.n}.", "n")
        _bounded(self.top_k, "top_k", -1, None)
        _bounded(self.min_tokens, "min_tokens", 0, None)
        if self.max_tokens is not None:
            _bounded(self.max_tokens, "max_tokens", 1, None)
            if self.min_tokens > self.max_tokens:
                raise RequestError(
                    f"min_tokens must be less than or equal to max_tokens={self.max_tokens}, "
                    f"got {self.min_tokens}.",
                    "min_tokens",
                )
        if self.logprobs is not None:
            _bounded(self.logprobs, "logprobs", -1, None)
        if self.prompt_logprobs is not None:
            _bounded(self.prompt_logprobs, "prompt_logprobs", -1, None)
        if self.seed is not None:
            _bounded(self.seed, "seed", -MAX_SEED - 1, MAX_SEED)

    def _check_floats(self) -> None:
        self.presence_penalty = _within(self.presence_penalty, "presence_penalty", -2.0, 2.0)
        self.frequency_penalty = _within(self.frequency_penalty, "frequency_penalty", -2.0, 2.0)
        self.temperature = _within(self.temperature, "temperature", 0.0, 2.0)
        self.min_p = _within(self.min_p, "min_p", 0.0, 1.0)
        self.repetition_penalty = _number(self.repetition_penalty, "repetition_penalty")
        if self.repetition_penalty <= 0:
            raise RequestError(
                f"repetition_penalty must be greater than zero, got {self.repetition_penalty}.",
                "repetition_penalty",
            )
        self.top_p = _number(self.top_p, "top_p")
        if not 0.0 < self.top_p <= 1.0:
            raise RequestError(f"top_p must be in (0, 1], got {self.top_p}.", "top_p")

    def _check_lists(self) -> None:
        if any(not isinstance(s, str) or not s for s in self.stop_strings):
            raise RequestError("stop cannot contain an empty string.", "stop")
        if self.stop_strings and not self.detokenize:
            raise RequestError(
                "stop strings are only supported when detokenize is True. Set detokenize=True to use stop.",
                "stop",
            )
        _ids(self.stop_token_ids, "stop_token_ids")
        _ids(self.allowed_token_ids, "allowed_token_ids")
        _ids(self.forbidden_token_ids, "forbidden_token_ids")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids is not None and empty!", "allowed_token_ids")
        if self.bad_words and any(not isinstance(w, str) or not w for w in self.bad_words):
            raise RequestError("bad_words cannot contain an empty string.", "bad_words")


def _integer(value: object, name: str) -> int:
    try:
        return int(value)  # type: ignore[call-overload, no-any-return]  # the point is to find out
    except (TypeError, ValueError):
        raise RequestError(f"{name} must hold integers, got {value!r}.", name) from None


def _number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RequestError(f"{name} must be a finite number, got {value!r}.", name)
    return float(value)


def _within(value: object, name: str, low: float, high: float) -> float:
    number = _number(value, name)
    if not low <= number <= high:
        raise RequestError(f"{name} must be in [{low:g}, {high:g}], got {value}.", name)
    return number


def _bounded(value: object, name: str, low: int, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, got {value!r}.", name)
    if value < low or (high is not None and value > high):
        allowed = f"at least {low}" if high is None else f"between {low} and {high}"
        raise RequestError(f"{name} must be {allowed}, got {value}.", name)


def _ids(values: Sequence[object] | None, name: str) -> None:
    for value in values or ():
        _bounded(value, name, 0, None)
