"""Requests that are made up: random texts of exact lengths, shared prefixes, pairs to rank.

A text is made of token ids, decoded, and encoded again until it has as many tokens as it should: not every
sequence of tokens survives the way through text (the procedure of `vllm bench`).
"""

import json
import math
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from octavo.base.errors import ConfigError
from octavo.bench.data_options import DataOptions
from octavo.frontend.text.tokenizer import Tokenizer

T = TypeVar("T")
_ATTEMPTS = 10

Prompt = str | list[str] | list[int]


@dataclass(frozen=True, slots=True)
class Sample:
    """One request."""

    prompt: Prompt
    """A text, token ids, or the texts of a request for embeddings; to rank: the query, then documents."""
    prompt_len: int
    """Its tokens, as counted here."""
    output_len: int = 0
    timestamp: float | None = None
    """Seconds after the start at which it is due, if the data set says."""
    request_id: str = ""


class TextMaker:
    """Draws texts of exact lengths, the same for the same seed."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self.tokenizer, self.draw = tokenizer, np.random.default_rng(seed)
        special = tokenizer.special_ids
        whole = (i for i in range(tokenizer.vocab_size) if i not in special and _is_text(tokenizer, i))
        self.ids = np.fromiter(whole, dtype=np.int64)

    def random_ids(self, length: int) -> list[int]:
        """Return ids drawn at random, none of them special."""
        drawn: list[int] = self.ids[self.draw.integers(0, len(self.ids), size=length)].tolist()
        return drawn

    def run_of_ids(self, start: int, length: int) -> list[int]:
        """Return ids one behind the other in the vocabulary, from `start`."""
        run: list[int] = self.ids[(start + np.arange(length)) % len(self.ids)].tolist()
        return run

    def text(self, ids: list[int]) -> tuple[str, list[int]]:
        """Return a text of `len(ids)` tokens, of these ids as far as text can say them, and its ids."""
        length = len(ids)
        for attempt in range(_ATTEMPTS + 1):
            text = self.tokenizer.decode(ids)
            ids = self.tokenizer.encode(text, add_special_tokens=False)
            if len(ids) == length or attempt == _ATTEMPTS:
                break
            ids = ids[:length] + self.random_ids(max(0, length - len(ids)))
        return text, ids

    def lengths(self, mean: int, spread: float, count: int) -> list[int]:
        """Draw lengths evenly from mean·(1 - spread) … mean·(1 + spread)."""
        low, high = math.floor(mean * (1 - spread)), math.ceil(mean * (1 + spread))
        drawn: list[int] = self.draw.integers(low, high + 1, size=count).tolist()
        return drawn


def random_texts(options: DataOptions, tokenizer: Tokenizer) -> list[Sample]:
    """Random texts behind a common prefix; several per request with `random_batch_size`."""
    maker = TextMaker(tokenizer, options.seed)
    spread_in, spread_out = _spreads(options.random_range_ratio)
    mean = (options.input_len or options.random_input_len) - len(tokenizer.encode(""))
    prefix = maker.text(maker.random_ids(options.random_prefix_len))[1]
    if math.floor(max(0, mean) * (1 - spread_in)) + len(prefix) < 1:
        raise ConfigError(
            f"--random-input-len is too small: with the tokenizer's special tokens and the "
            f"spread {spread_in} "
            "a request could be empty. Give a larger one, or a --random-prefix-len."
        )
    count = options.num_prompts
    inputs = maker.lengths(max(0, mean), spread_in, count)
    outputs = [max(1, n) for n in maker.lengths(options.length(options.random_output_len), spread_out, count)]
    starts = maker.draw.integers(0, tokenizer.vocab_size, size=count).tolist()
    samples = []
    for index in range(count):
        text, ids = maker.text(prefix + maker.run_of_ids(starts[index] + index, inputs[index]))
        samples.append(Sample(text, len(ids), outputs[index]))
    return _batched(samples, options.random_batch_size)


def random_rerank(options: DataOptions, tokenizer: Tokenizer) -> list[Sample]:
    """One random query and documents, `random_batch_size` to a request."""
    maker = TextMaker(tokenizer, options.seed)
    spread, _ = _spreads(options.random_range_ratio)
    length = options.input_len or options.random_input_len
    separators = int(options.reranker)
    half = length // 2 - separators if options.reranker else length
    [query_len] = maker.lengths(half, spread, 1)
    query, query_ids = maker.text(maker.random_ids(query_len))
    mean = length - query_len - separators if options.reranker else length
    lengths = maker.lengths(max(1, mean), spread, options.num_prompts)
    documents = [maker.text(maker.random_ids(max(1, n))) for n in lengths]
    size, samples = max(1, options.random_batch_size), []
    for start in range(0, len(documents), size):
        batch = documents[start : start + size]
        queries = (len(query_ids) + separators) * (len(batch) if options.reranker else 1)
        tokens = queries + sum(len(ids) for _, ids in batch)
        samples.append(Sample([query, *(text for text, _ in batch)], tokens))
    return samples


def prefix_repetition(options: DataOptions, tokenizer: Tokenizer) -> list[Sample]:
    """A few long prefixes, each with many endings, in random order."""
    num_prefixes = options.prefix_repetition_num_prefixes
    each = options.num_prompts // max(1, num_prefixes)
    if each < 1:
        raise ConfigError(
            f"num_requests ({options.num_prompts}) must be greater than or equal to num_prefixes "
            f"({num_prefixes}), and num_prefixes at least 1."
        )
    maker = TextMaker(tokenizer, options.seed)
    output_len = options.length(options.prefix_repetition_output_len)
    samples = []
    for _ in range(num_prefixes):
        _, prefix = maker.text(maker.random_ids(options.prefix_repetition_prefix_len))
        for _ in range(each):
            _, suffix = maker.text(maker.random_ids(options.prefix_repetition_suffix_len))
            samples.append(Sample(tokenizer.decode(prefix + suffix), len(prefix + suffix), output_len))
    return samples if options.disable_shuffle else shuffled(samples, options.seed)


def shuffled(items: list[T], seed: int) -> list[T]:
    """Return the items in a random order, the same for the same seed."""
    return [items[i] for i in np.random.default_rng(seed).permutation(len(items))]


def _is_text(tokenizer: Tokenizer, token_id: int) -> bool:
    """Return False for a part of a character, which text cannot say alone."""
    try:
        return bool(tokenizer.token_bytes(token_id).decode())
    except UnicodeDecodeError:
        return False


def _batched(samples: list[Sample], size: int) -> list[Sample]:
    if size <= 1:
        return samples
    batches = [samples[start : start + size] for start in range(0, len(samples), size)]
    return [Sample([str(s.prompt) for s in batch], sum(s.prompt_len for s in batch)) for batch in batches]


def _spreads(text: str) -> tuple[float, float]:
    """The spread of input and output lengths. Raises ConfigError."""
    try:
        value = json.loads(text)
        pair = (value["input"], value["output"]) if isinstance(value, dict) else (value, value)
        spreads = float(pair[0]), float(pair[1])
    except (ValueError, TypeError, KeyError):
        raise ConfigError(
            f"--random-range-ratio {text} must be a number, or JSON with 'input' and 'output'."
        ) from None
    if not all(0 <= spread < 1 for spread in spreads):
        raise ConfigError(f"--random-range-ratio {text} must be in [0, 1).")
    return spreads
