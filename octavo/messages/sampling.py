"""`SamplingParams`: what a user asks of one request. Public, and part of the messages.

Names, defaults, rules and texts follow vLLM's class of the same name; the exceptions are marked "octavo".
Rules that need the model (vocabulary, context) are checked by the input processor.
"""

import math
from collections.abc import Mapping, Set
from enum import IntEnum
from numbers import Integral, Real
from typing import Any

import msgspec

from octavo.base.errors import RequestError
from octavo.base.log import get_logger

_log = get_logger(__name__)

GREEDY_BELOW = 1e-5
LOWEST_TEMPERATURE = 1e-2
MAX_N = 16384
MAX_SEED = 2**63 - 1
_MAX_INTEGER = 2**63 - 1  # what a message can carry
_FLAGS = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)


class RequestOutputKind(IntEnum):
    """What each output of a stream carries."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingParams(msgspec.Struct, omit_defaults=True, dict=False):
    """How the tokens of one request are chosen and when it ends. Raises RequestError for a wrong value."""

    n: int = 1
    """Sequences for one prompt; sequence i uses seed + i. Must be 1 when greedy."""
    presence_penalty: float = 0.0
    """-2 … 2; subtracted once from every token that the output has."""
    frequency_penalty: float = 0.0
    """-2 … 2; subtracted per occurrence in the output."""
    repetition_penalty: float = 1.0
    """> 0; divides positive and multiplies negative logits of tokens in prompt and output."""
    temperature: float = 1.0
    """0 … 2; 0 is greedy, other values below 0.01 are raised to it."""
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
    """Logprobs of this many likeliest tokens per output position, besides the chosen one; -1 = all tokens."""
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
        self._check_floats()
        self._check_integers()
        self._check_texts()
        self._check_tokens()
        self._check_the_rest()
        if self.greedy:
            if self.n > 1:
                raise RequestError(f"n must be 1 when using greedy sampling, got {self.n}.", "n")
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0

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

    def _check_floats(self) -> None:
        self.presence_penalty = _within(self.presence_penalty, "presence_penalty", -2.0, 2.0)
        self.frequency_penalty = _within(self.frequency_penalty, "frequency_penalty", -2.0, 2.0)
        self.repetition_penalty = _number(self.repetition_penalty, "repetition_penalty")
        if self.repetition_penalty <= 0:
            raise RequestError(
                f"repetition_penalty must be greater than zero, got {self.repetition_penalty}.",
                "repetition_penalty",
            )
        if _number(self.temperature, "temperature") < 0:
            raise RequestError(f"temperature must be non-negative, got {self.temperature}.", "temperature")
        self.temperature = _within(self.temperature, "temperature", 0.0, 2.0)
        if GREEDY_BELOW <= self.temperature < LOWEST_TEMPERATURE:
            _log.warning("temperature %s is raised to %s.", self.temperature, LOWEST_TEMPERATURE)
            self.temperature = LOWEST_TEMPERATURE
        self.top_p = _number(self.top_p, "top_p")
        if not 0.0 < self.top_p <= 1.0:
            raise RequestError(f"top_p must be in (0, 1], got {self.top_p}.", "top_p")
        self.min_p = _within(self.min_p, "min_p", 0.0, 1.0)

    def _check_integers(self) -> None:
        self.n = _integer(self.n, "n", 1, "at least 1")
        if self.n > MAX_N:
            raise RequestError(f"n must be at most {MAX_N}, got {self.n}.", "n")
        self.top_k = _integer(self.top_k, "top_k", -1, "0 (disable), or at least 1")
        self.min_tokens = _integer(self.min_tokens, "min_tokens", 0, "greater than or equal to 0")
        if self.max_tokens is not None:
            self.max_tokens = _integer(self.max_tokens, "max_tokens", 1, "at least 1")
            if self.min_tokens > self.max_tokens:
                raise RequestError(
                    f"min_tokens must be less than or equal to max_tokens={self.max_tokens}, "
                    f"got {self.min_tokens}.",
                    "min_tokens",
                )
        self.logprobs = _number_of_logprobs(self.logprobs, "logprobs")
        self.prompt_logprobs = _number_of_logprobs(self.prompt_logprobs, "prompt_logprobs")
        if self.skip_reading_prefix_cache is None:
            self.skip_reading_prefix_cache = self.prompt_logprobs is not None
        if self.seed is not None:
            seed = _integer(self.seed, "seed", -MAX_SEED - 1, f"at least {-MAX_SEED - 1}")
            self.seed = None if seed == -1 else seed

    def _check_texts(self) -> None:
        if self.stop is not None:
            self.stop = _texts([self.stop] if isinstance(self.stop, str) else self.stop, "stop")
            if "" in self.stop:
                raise RequestError("stop cannot contain an empty string.", "stop")
            if self.stop and not self.detokenize:
                raise RequestError(
                    "stop strings are only supported when detokenize is True. "
                    "Set detokenize=True to use stop.",
                    "stop",
                )
        if self.bad_words is not None:
            self.bad_words = list(dict.fromkeys(_texts(self.bad_words, "bad_words")))
            if "" in self.bad_words:
                raise RequestError(
                    f"bad_words cannot contain an empty string. Got bad_words={self.bad_words}", "bad_words"
                )

    def _check_tokens(self) -> None:
        for name in ("stop_token_ids", "allowed_token_ids", "forbidden_token_ids"):
            if (ids := getattr(self, name)) is not None:
                setattr(self, name, _token_ids(ids, name))
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids is not None and empty!", "allowed_token_ids")
        if self.bad_words_token_ids is not None:
            words = [_token_ids(word, "bad_words_token_ids", False) for word in self.bad_words_token_ids]
            self.bad_words_token_ids = [word for word in words if word]
        if self.logit_bias is not None:
            self.logit_bias = _biases(self.logit_bias)

    def _check_the_rest(self) -> None:
        for name in _FLAGS:
            if not isinstance(value := getattr(self, name), bool):
                raise RequestError(f"{name} must be True or False, got {value!r}.", name)
        try:
            self.output_kind = RequestOutputKind(self.output_kind)
        except ValueError:
            kinds = ", ".join(f"{kind.name} ({kind.value})" for kind in RequestOutputKind)
            raise RequestError(
                f"output_kind must be one of {kinds}, got {self.output_kind!r}.", "output_kind"
            ) from None
        try:
            msgspec.msgpack.encode(self.extra_args)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise RequestError(
                "extra_args must hold plain values, and integers of 64 bits at most.", "extra_args"
            ) from error


def _number(value: object, name: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RequestError(f"{name} must be a finite number, got {value!r}.", name)
    return number


def _within(value: object, name: str, low: float, high: float) -> float:
    number = _number(value, name)
    if not low <= number <= high:
        raise RequestError(f"{name} must be in [{low:g}, {high:g}], got {number}.", name)
    return number


def _integer(value: object, name: str, low: int, allowed: str) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise RequestError(f"{name} must be an integer, got {value!r}.", name)
    number = int(value)
    if number < low:
        raise RequestError(f"{name} must be {allowed}, got {number}.", name)
    if number > _MAX_INTEGER:
        raise RequestError(f"{name} must be less than 2**63, got {number}.", name)
    return number


def _number_of_logprobs(value: object, name: str) -> int | None:
    if value is None or value is False:
        return None
    return 1 if value is True else _integer(value, name, -1, "non-negative or -1")


def _texts(values: object, name: str) -> list[str]:
    if not isinstance(values, list | tuple) or not all(isinstance(text, str) for text in values):
        raise RequestError(f"{name} must be a list of strings, got {values!r}.", name)
    if any("\ud800" <= character <= "\udfff" for text in values for character in text):
        raise RequestError(f"{name} holds half of a surrogate pair, which is no text: {values!r}.", name)
    return list(values)


def _token_ids(values: object, name: str, unique: bool = True) -> list[int]:
    """In their order; each once if `unique`."""
    if not isinstance(values, list | tuple | range | Set):
        raise RequestError(f"{name} must be a list of token ids, got {values!r}.", name)
    if any(isinstance(value, bool) or not isinstance(value, Integral) for value in values):
        raise RequestError(f"{name} must contain only integers, got {values!r}.", name)
    ids = [_integer(value, name, 0, "ids of at least 0") for value in values]
    return list(dict.fromkeys(ids)) if unique else ids


def _biases(values: object) -> dict[int, float]:
    """Keys as integers, values clamped to what is allowed."""
    if not isinstance(values, Mapping):
        raise RequestError(f"logit_bias must map token ids to numbers, got {values!r}.", "logit_bias")
    biases, invalid = {}, []
    for key, value in values.items():
        try:
            token_id = int(key)
        except (TypeError, ValueError, OverflowError):
            invalid.append(key)
            continue
        _integer(token_id, "logit_bias", 0, "about token ids of at least 0")
        biases[token_id] = min(100.0, max(-100.0, _number(value, "logit_bias")))
    if invalid:
        raise RequestError(
            f"logit_bias contains key(s) that cannot be converted to integer token IDs: {invalid!r}",
            "logit_bias",
        )
    return biases
