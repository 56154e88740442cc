"""What one engine allows of `SamplingParams`: the checks that need its model or its options.

Called by the input processor only. Rules that hold for every model are in `SamplingParams` itself; names and
texts follow vLLM's. The vocabulary is the width of the logits, which may differ from the tokenizer's.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

from octavo.base.errors import OctavoError, RequestError, Unsupported, wrong
from octavo.base.registry import load_named
from octavo.config.engine import EngineConfig
from octavo.frontend.requests.conversation import ChatRenderer
from octavo.frontend.requests.thinking import thinking_tag_ids
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.messages.sampling import SamplingParams

_HERE = ("inproc", "external_launcher")
"""Executors that compute in the core's process."""
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 4096
MAX_BAD_WORDS = 128
MAX_BAD_WORD_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class SamplingLimits:
    """The engine's side of the bargain."""

    vocab_size: int
    max_logprobs: int
    """-1 = the vocabulary."""
    tokenizer: Tokenizer | None
    stream_interval: int = 1
    """Least that a request may ask for."""
    takes_functions: bool = False
    """Whether logits are computed in this process."""
    processors: tuple[Any, ...] = ()
    """The engine's own logits processors: classes."""
    thinking_tags: list[list[int]] | None = None
    """Between which the model reasons; None = it is not known to."""

    @classmethod
    def of(cls, config: EngineConfig, tokenizer: Tokenizer | None, *, core_is_here: bool) -> "SamplingLimits":
        """Those of an engine, whose core may run in this process. Raises ConfigError."""
        return cls(
            vocab_size=config.checkpoint.vocab_size,
            max_logprobs=config.model.max_logprobs,
            tokenizer=tokenizer,
            stream_interval=config.front.stream_interval,
            takes_functions=core_is_here and config.parallel.distributed_executor_backend in _HERE,
            processors=tuple(
                load_named(name, "logits_processors") for name in config.model.logits_processors
            ),
            thinking_tags=thinking_tag_ids(ChatRenderer(config, tokenizer).reasoning_parser, tokenizer),
        )

    def resolve(self, params: SamplingParams) -> SamplingParams:
        """A checked copy: -1 logprobs turned into a number, bad words into ids. Raises RequestError."""
        resolved = params.clone()
        if resolved.logprob_token_ids is None:
            resolved.logprobs = self._num_logprobs(resolved.logprobs, "logprobs", "sample")
        resolved.prompt_logprobs = self._num_logprobs(resolved.prompt_logprobs, "prompt_logprobs", "prompt")
        self._check_ids(resolved)
        self._check_strings(resolved)
        self._check_processors(resolved)
        resolved.stream_interval = max(resolved.stream_interval or 1, self.stream_interval)
        resolved.bad_words_token_ids = self._bad_words(resolved.bad_words) if resolved.bad_words else None
        resolved.thinking_tag_ids = self._thinking_tags(resolved)
        return resolved

    def _num_logprobs(self, asked: int | None, name: str, kind: str) -> int | None:
        if asked is None:
            return None
        number = self.vocab_size if asked == -1 else asked
        allowed = self.vocab_size if self.max_logprobs == -1 else self.max_logprobs
        if number > allowed:
            raise RequestError(
                f"Requested {kind} logprobs of {number}, which is greater than max allowed: {allowed}. "
                "Ask for fewer, or raise max_logprobs.",
                name,
            )
        return number

    def _check_ids(self, params: SamplingParams) -> None:
        self._in_vocab(params.stop_token_ids, "stop_token_ids")
        self._in_vocab(params.logit_bias, "logit_bias")
        self._in_vocab(params.logprob_token_ids, "logprob_token_ids")
        self._in_vocab(chain.from_iterable(params.prompt_candidates), "prompt_logprob_token_ids")
        self._in_vocab(params.allowed_token_ids, "allowed_token_ids")
        self._in_vocab(params.forbidden_token_ids, "forbidden_token_ids")
        allowed = range(self.vocab_size) if params.allowed_token_ids is None else params.allowed_token_ids
        if params.forbidden_token_ids and set(params.forbidden_token_ids).issuperset(allowed):
            raise wrong("forbidden_token_ids", "leaves no token that may be chosen")

    def _in_vocab(self, ids: Iterable[int] | None, name: str) -> None:
        ids = list(ids or ())
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            outside = [i for i in ids if not 0 <= i < self.vocab_size]
            raise RequestError(
                f"token_id(s) {outside[:8]} in {name} are out of vocabulary. "
                f"Vocabulary size: {self.vocab_size}.",
                name,
            )

    def _check_strings(self, params: SamplingParams) -> None:
        if len(params.stop_strings) > MAX_STOP_STRINGS:
            raise wrong(
                "stop", f"may hold at most {MAX_STOP_STRINGS} strings, got {len(params.stop_strings)}"
            )
        if (longest := max(map(len, params.stop_strings), default=0)) > MAX_STOP_CHARS:
            raise RequestError(
                f"A stop string may have at most {MAX_STOP_CHARS} characters, got {longest}.", "stop"
            )
        if self.tokenizer is None and (params.stop_strings or params.bad_words):
            name = "stop" if params.stop_strings else "bad_words"
            raise wrong(name, "needs the tokenizer, which skip_tokenizer_init=True left out: give token ids")

    def _check_processors(self, params: SamplingParams) -> None:
        if params.logits_processors and not self.takes_functions:
            raise Unsupported(
                "A request's logits_processors are functions of this process, and this engine computes in "
                "others (AsyncLLM, or several ranks). Use LLM or LLMEngine with one rank, or give the engine "
                "a class: its option logits_processors."
            )
        for processor in self.processors:
            try:
                processor.validate_params(params)
            except OctavoError:
                raise
            except ValueError as error:
                raise RequestError(str(error)) from error

    def _thinking_tags(self, params: SamplingParams) -> list[list[int]] | None:
        name = "thinking_token_budget"
        if params.thinking_token_budget is None:
            return None
        if self.thinking_tags is None:
            raise wrong(
                name,
                "needs a model that marks its reasoning, and the parser of its marks. This chat "
                "template shows none: start the engine with reasoning_parser, or leave the budget out",
            )
        form = params.structured_outputs
        if form is not None and not form.after_reasoning:
            raise RequestError(
                f"{name} and structured_outputs exclude each other, unless the form is told to hold "
                "after_reasoning: else it holds from the first token, and there is no reasoning before it.",
                name,
            )
        self._in_vocab(chain.from_iterable(self.thinking_tags), name)
        return self.thinking_tags

    def _bad_words(self, words: list[str]) -> list[list[int]]:
        assert self.tokenizer is not None  # checked with the strings
        if len(words) > MAX_BAD_WORDS:
            raise wrong("bad_words", f"may hold at most {MAX_BAD_WORDS} words, got {len(words)}")
        sequences: list[list[int]] = []
        for word in words:
            plain = self.tokenizer.encode(word.lstrip() or word, add_special_tokens=False)
            spaced = self.tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
            sequences.append(plain)
            if (
                len(spaced) == len(plain) and spaced[:1] != plain[:1]
            ):  # the space has become part of the first token
                sequences.append(spaced)
        self._in_vocab((i for ids in sequences for i in ids), "bad_words")
        if sum(map(len, sequences)) > MAX_BAD_WORD_TOKENS:
            raise wrong("bad_words", f"may hold at most {MAX_BAD_WORD_TOKENS} tokens together")
        return [ids for ids in sequences if ids]
