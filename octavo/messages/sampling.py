"""`SamplingParams`: what a user asks of one request. Public, and part of the messages.

Names, defaults, rules and texts follow vLLM's class of the same name; the exceptions are marked "octavo".
Rules that need the model (vocabulary, context) are checked by the input processor.
"""

from enum import IntEnum
from typing import Any

import msgspec

from octavo.base.errors import RequestError, wrong
from octavo.base.log import get_logger
from octavo.messages import sampling_values as read
from octavo.messages.sampling_keywords import SamplingKeywords
from octavo.messages.speech import TranscriptRules
from octavo.messages.structured import StructuredOutputsParams

_log = get_logger(__name__)

GREEDY_BELOW = 1e-5
LOWEST_TEMPERATURE = 1e-2
MAX_N = 16384
MAX_SEED = 2**63 - 1
MAX_LOGPROB_TOKEN_IDS = 128
MAX_TAG_TOKENS = 32
_NUMBERS = {"presence_penalty": (-2.0, 2.0), "frequency_penalty": (-2.0, 2.0), "min_p": (0.0, 1.0)}
_POSITIVE = ("repetition_penalty", "timeout_s")
_INTEGERS = {
    "n": (1, "at least 1"),
    "best_of": (1, "at least 1"),
    "top_k": (-1, "0 (disable), or at least 1"),
    "min_tokens": (0, "greater than or equal to 0"),
    "max_tokens": (1, "at least 1"),
    "seed": (-MAX_SEED - 1, f"at least {-MAX_SEED - 1}"),
    "stream_interval": (1, "at least 1"),
    "thinking_token_budget": (-1, "non-negative or -1"),
    "prompt_logprob_start": (0, "at least 0"),
    "routed_experts_prompt_start": (0, "at least 0"),
}
"""The least that is allowed, and how it is said."""
_OPTIONAL = ("timeout_s", "best_of", "max_tokens", "seed", "stream_interval", "thinking_token_budget")


class RequestOutputKind(IntEnum):
    """What each output of a stream carries."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class RepetitionDetectionParams(msgspec.Struct, omit_defaults=True, frozen=True):
    """End an output that ends with the same pattern of tokens several times over. Raises RequestError."""

    max_pattern_size: int = 0
    """Longest pattern in tokens; 0 = detect nothing."""
    min_pattern_size: int = 0
    """Shortest pattern; 0 = 1."""
    min_count: int = 0
    """Repetitions that end the output; at least 2."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            read.integer(getattr(self, name), name, 0, "at least 0")
        if self.min_pattern_size > self.max_pattern_size:
            raise RequestError(
                "max_pattern_size, min_pattern_size must be >=0, with min_pattern_size <= max_pattern_size. "
                "Set both to 0 to disable repetitive pattern detection.",
                "repetition_detection",
            )
        if self.max_pattern_size > 0 and self.min_count < 2:
            raise RequestError(
                "min_count must be >= 2 to detect repetitive patterns in engine output. If you do not wish "
                "to detect repetitive patterns, set max_pattern_size to 0.",
                "repetition_detection",
            )


class SamplingParams(
    msgspec.Struct, metaclass=SamplingKeywords, omit_defaults=True, dict=False, tag="sample"
):
    """How the tokens of one request are chosen and when it ends. Raises RequestError for a wrong value."""

    n: int = 1
    """Sequences for one prompt; sequence i uses seed + i. Must be 1 when greedy."""
    best_of: int | None = None
    """Sequences generated, of which the n with the highest cumulative logprob are shown, at the end; None = n
    (octavo). With use_beam_search: the beam width."""
    presence_penalty: float = 0.0
    """-2 … 2; subtracted once from every token that the output has."""
    frequency_penalty: float = 0.0
    """-2 … 2; subtracted per occurrence in the output."""
    repetition_penalty: float = 1.0
    """> 0; divides positive and multiplies negative logits of tokens in prompt and output."""
    temperature: float = 1.0
    """0 … 2; 0 is greedy, other values below 0.01 are raised to it."""
    top_p: float = 1.0
    """0 < top_p ≤ 1; keep the most likely tokens whose probabilities reach top_p."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 or -1 = all."""
    min_p: float = 0.0
    """0 … 1; keep tokens at least min_p times as likely as the most likely one."""
    seed: int | None = None
    """Key of the noise; the same seed gives the same tokens however requests are batched. -1 = None."""
    stop: str | list[str] | None = None
    """Strings that end the output."""
    stop_strings: list[str] = []
    """Another name of `stop` (octavo); holds its strings in either case."""
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
    """Logprobs of this many most likely tokens per output position, besides the chosen one; -1 = all."""
    prompt_logprobs: int | None = None
    """The same for every prompt position but the first."""
    logprob_token_ids: list[int] | None = None
    """Logprobs of these tokens, at most 128, instead of the most likely ones; `logprobs` is their number."""
    prompt_logprob_token_ids: list[int | list[int]] | None = None
    """Candidates to score at every prompt position after `prompt_logprob_start`: one list for all, or one per
    position. The scores are in `RequestOutput.prompt_token_id_logprobs`."""
    prompt_logprob_start: int = 0
    """Prompt position whose successor is the first to be scored."""
    flat_logprobs: bool = False
    """Give logprobs as FlatLogprobs: read like the lists of dicts, in a fraction of the memory. Those of the
    whole vocabulary (-1), or of more than 1,000 tokens, always come so."""
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    """Show a sequence when it has this many new tokens, and when it begins and ends; None = 1."""
    logit_bias: dict[int, float] | None = None
    """Added to the logits of these tokens; -100 … 100."""
    allowed_token_ids: list[int] | None = None
    forbidden_token_ids: list[int] | None = None
    """Never chosen (octavo)."""
    skip_reading_prefix_cache: bool | None = None
    """Compute the whole prompt; None = only when prompt_logprobs are asked for. With False, cached
    positions have none."""
    use_beam_search: bool = False
    """Search the most likely sequences instead of drawing (octavo, as are the fields for it that follow)."""
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    num_beam_groups: int = 1
    diversity_penalty: float = 0.0
    repetition_detection: RepetitionDetectionParams | None = None
    structured_outputs: StructuredOutputsParams | None = None
    """The form of the output, or a mapping with its fields."""
    timeout_s: float | None = None
    """Seconds from its arrival, waiting included, after which the request ends with the text so far and
    finish reason "timeout" (octavo)."""
    thinking_token_budget: int | None = None
    """Maximum number of reasoning tokens, after which the end of the reasoning is forced; needs a reasoning
    parser. -1 = None."""
    logits_processors: list[Any] | None = None
    """Functions that change this request's logits: (output_ids, logits) → logits, a tensor [vocab_size], or
    the same with prompt_ids before. Only where the core runs in the caller's process: LLM, LLMEngine."""
    extra_args: dict[str, Any] | None = None
    routed_experts_prompt_start: int = 0
    """With enable_return_routed_experts: prompt tokens to leave out at the beginning of `routed_experts`."""
    bad_words_token_ids: list[list[int]] | None = None
    """`bad_words` as token sequences; filled by the input processor, not by users."""
    thinking_tag_ids: list[list[int]] | None = None
    """For a thinking budget, what opens reasoning (nothing: it is open from the start) and what closes it, at
    most MAX_TAG_TOKENS each; filled by the input processor too."""

    transcript_rules: TranscriptRules | None = None
    """Of a model for speech, as is `returns_alignment`; both are filled by the input processor."""
    returns_alignment: bool = False
    """Bring how tokens of the prompt attend to the source, and no token (octavo)."""

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_integers()
        self._check_texts()
        self._check_tokens()
        self._check_logprobs()
        self._check_the_rest()
        if self.greedy:
            self._check_greedy()
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0

    @property
    def num_sequences(self) -> int:
        """Sequences generated for one prompt."""
        return self.n if self.best_of is None else self.best_of

    @property
    def greedy(self) -> bool:
        """True if the greedy token is always chosen."""
        return self.temperature < GREEDY_BELOW

    @property
    def prompt_candidates(self) -> list[list[int]]:
        """`prompt_logprob_token_ids` as lists: none, one for all scored positions, or one for each."""
        ids: list[Any] = self.prompt_logprob_token_ids or []
        return ids if ids and isinstance(ids[0], list) else [ids] if ids else []

    def clone(self) -> "SamplingParams":
        """A copy that shares nothing mutable that octavo changes, checked anew."""
        return msgspec.structs.replace(self, stop_strings=[])

    @classmethod
    def from_optional(cls, **values: Any) -> "SamplingParams":
        """The same as the class, with None for "the default" (but for max_tokens, where it has a meaning)."""
        return cls(
            **{name: value for name, value in values.items() if value is not None or name == "max_tokens"}
        )

    def _check_numbers(self) -> None:
        for name, (low, high) in _NUMBERS.items():
            setattr(self, name, read.within(getattr(self, name), name, low, high))
        for name in _POSITIVE:
            if (value := getattr(self, name)) is not None or name not in _OPTIONAL:
                setattr(self, name, read.number(value, name))
                if getattr(self, name) <= 0:
                    raise wrong(name, f"must be greater than zero, got {getattr(self, name)}")
        if read.number(self.temperature, "temperature") < 0:
            raise wrong("temperature", f"must be non-negative, got {self.temperature}")
        self.temperature = read.within(self.temperature, "temperature", 0.0, 2.0)
        if GREEDY_BELOW <= self.temperature < LOWEST_TEMPERATURE:
            _log.warning("temperature %s is raised to %s.", self.temperature, LOWEST_TEMPERATURE)
            self.temperature = LOWEST_TEMPERATURE
        self.top_p = read.number(self.top_p, "top_p")
        if not 0.0 < self.top_p <= 1.0:
            raise wrong("top_p", f"must be in (0, 1], got {self.top_p}")

    def _check_integers(self) -> None:
        for name, (low, allowed) in _INTEGERS.items():
            if (value := getattr(self, name)) is not None or name not in _OPTIONAL:
                setattr(self, name, read.integer(value, name, low, allowed))
        if self.n > MAX_N:
            raise wrong("n", f"must be at most {MAX_N}, got {self.n}")
        if not self.n <= self.num_sequences <= MAX_N:
            allowed = f"greater than or equal to n and at most {MAX_N}"
            raise wrong("best_of", f"must be {allowed}, got n={self.n} and best_of={self.best_of}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            allowed = f"less than or equal to max_tokens={self.max_tokens}"
            raise wrong("min_tokens", f"must be {allowed}, got {self.min_tokens}")
        self.seed = None if self.seed == -1 else self.seed
        if self.thinking_token_budget == -1:
            self.thinking_token_budget = None

    def _check_greedy(self) -> None:
        for name, count in (("n", self.n), ("best_of", self.num_sequences)):
            if count > 1 and not self.use_beam_search:
                raise wrong(name, f"must be 1 when using greedy sampling, got {count}")

    def _check_texts(self) -> None:
        self.stop_strings = self.stop_strings or []
        if self.stop_strings:
            self.stop_strings = read.strings(self.stop_strings, "stop_strings")
            if self.stop and read.strings(self.stop, "stop") != self.stop_strings:
                text = "stop and stop_strings are two names of one thing: give one."
                raise RequestError(text, "stop_strings")
            self.stop = self.stop_strings
        if self.stop is not None:
            self.stop = self.stop_strings = read.strings(self.stop, "stop")
            if self.stop and not self.detokenize:
                what = "strings are only supported when detokenize is True. Set detokenize=True to use stop"
                raise wrong("stop", what)
        if self.bad_words is not None:
            self.bad_words = list(dict.fromkeys(read.texts(self.bad_words, "bad_words")))
            if "" in self.bad_words:
                text = f"bad_words cannot contain an empty string. Got bad_words={self.bad_words}"
                raise RequestError(text, "bad_words")

    def _check_tokens(self) -> None:
        for name in ("stop_token_ids", "allowed_token_ids", "forbidden_token_ids"):
            if (ids := getattr(self, name)) is not None:
                setattr(self, name, read.token_ids(ids, name))
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids is not None and empty!", "allowed_token_ids")
        if self.bad_words_token_ids is not None:
            words = [read.token_ids(word, "bad_words_token_ids", False) for word in self.bad_words_token_ids]
            self.bad_words_token_ids = [word for word in words if word]
        if self.logit_bias is not None:
            self.logit_bias = read.biases(self.logit_bias)

    def _check_logprobs(self) -> None:
        self.logprobs = read.number_of_logprobs(self.logprobs, "logprobs")
        self.prompt_logprobs = read.number_of_logprobs(self.prompt_logprobs, "prompt_logprobs")
        if self.logprob_token_ids is not None:
            ids = read.token_ids(self.logprob_token_ids, "logprob_token_ids")
            count = len(ids)
            if not 0 < count <= MAX_LOGPROB_TOKEN_IDS:
                what = f"must hold 1 to {MAX_LOGPROB_TOKEN_IDS} ids, got {count}"
                raise wrong("logprob_token_ids", what)
            if self.logprobs not in (None, count):
                what = f"must be None or the number of logprob_token_ids ({count}), got {self.logprobs}"
                raise wrong("logprobs", what)
            self.logprob_token_ids, self.logprobs = ids, count
        if self.prompt_logprob_token_ids is not None:
            self.prompt_logprob_token_ids = _candidates(self.prompt_logprob_token_ids)
        elif self.prompt_logprob_start:
            what = "belongs to prompt_logprob_token_ids, which is None"
            raise wrong("prompt_logprob_start", what)
        if self.skip_reading_prefix_cache is None:
            scored = self.prompt_logprobs, self.prompt_logprob_token_ids
            self.skip_reading_prefix_cache = scored != (None, None)

    def _check_the_rest(self) -> None:
        for name in _FLAGS:
            if not isinstance(value := getattr(self, name), bool):
                raise wrong(name, f"must be True or False, got {value!r}")
        try:
            self.output_kind = RequestOutputKind(self.output_kind)
        except ValueError:
            kinds = ", ".join(f"{kind.name} ({kind.value})" for kind in RequestOutputKind)
            raise wrong("output_kind", f"must be one of {kinds}, got {self.output_kind!r}") from None
        detection: object = self.repetition_detection
        if not isinstance(detection, RepetitionDetectionParams | None):
            what = f"must be RepetitionDetectionParams, got {detection!r}"
            raise wrong("repetition_detection", what)
        if self.structured_outputs is not None:
            self.structured_outputs = StructuredOutputsParams.of(self.structured_outputs)
        if self.logits_processors is not None:
            self.logits_processors = read.functions(self.logits_processors, "logits_processors")
        try:
            msgspec.msgpack.encode(self.extra_args)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            what = "must hold plain values, and integers of 64 bits at most"
            raise wrong("extra_args", what) from error


def _candidates(values: object) -> list[int | list[int]]:
    """One list of token ids, or one for each scored position."""
    name = "prompt_logprob_token_ids"
    rows = list(values) if isinstance(values, list | tuple) else []
    per_position = bool(rows) and isinstance(rows[0], list | tuple)
    lists = [read.token_ids(row, name, False) for row in (rows if per_position else [values])]
    for ids in lists:
        if len(ids) > MAX_LOGPROB_TOKEN_IDS or not (ids or per_position):
            what = f"must hold 1 to {MAX_LOGPROB_TOKEN_IDS} ids, of single positions 0 too, got {len(ids)}"
            raise wrong(name, what)
    return [*lists] if per_position else [*lists[0]]


_FLAGS = [field.name for field in msgspec.structs.fields(SamplingParams) if field.type is bool]
