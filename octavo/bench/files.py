"""Data sets in files: ShareGPT, custom JSON lines, Spec-Bench, BurstGPT, timed traces (Mooncake's format).

Files are foreign: every line is checked, and the error names it.
"""

import csv
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from octavo.base.errors import ConfigError
from octavo.bench.data_options import DataOptions
from octavo.bench.generated import Sample, TextMaker, shuffled
from octavo.frontend.text.tokenizer import Tokenizer

_MIN_LEN, _MAX_PROMPT_LEN, _MAX_TOTAL_LEN = 4, 1024, 2048
"""What of ShareGPT is used, as in `vllm bench`."""


def sharegpt(options: DataOptions, tokenizer: Tokenizer) -> list[Sample]:
    """The first question of each conversation; its answer says how many tokens are wanted."""
    data = _read_json(options.dataset_path)
    if not isinstance(data, list):
        raise ConfigError(f"{options.dataset_path} must hold a JSON list of conversations.")
    talks = [
        e["conversations"] for e in data if isinstance(e, dict) and len(e.get("conversations") or ()) > 1
    ]
    fixed = options.length(options.sharegpt_output_len)
    samples: list[Sample] = []
    for talk in talks if options.disable_shuffle else shuffled(talks, options.seed):
        if len(samples) == options.num_prompts:
            break
        try:
            question, answer = str(talk[0]["value"]), str(talk[1]["value"])
        except (KeyError, TypeError):
            raise ConfigError(
                f'{options.dataset_path}: a turn needs "value", found {talk[0]!r:.80}.'
            ) from None
        prompt_len = len(tokenizer.encode(question))
        output_len = fixed or len(tokenizer.encode(answer))
        fits = _MIN_LEN <= prompt_len <= _MAX_PROMPT_LEN and prompt_len + output_len <= _MAX_TOTAL_LEN
        if fits and (fixed or output_len >= _MIN_LEN):
            samples.append(Sample(question, prompt_len, output_len))
    return samples


def custom(options: DataOptions, tokenizer: Tokenizer) -> list[Sample]:
    """Lines with "prompt" and, with --custom-output-len -1, "output_tokens"."""
    if not options.dataset_path.endswith(".jsonl"):
        raise ConfigError(f"Only JSONL format is supported for custom data: {options.dataset_path}.")
    wanted = options.length(options.custom_output_len)
    rows = [
        (_text(entry, "prompt", where), _count(entry, "output_tokens", where) if wanted == -1 else wanted)
        for where, entry in _read_lines(options.dataset_path)
    ]
    return _questions(rows, options, tokenizer)


def spec_bench(options: DataOptions, tokenizer: Tokenizer) -> list[Sample]:
    """Spec-Bench's question.jsonl: the first of each line's "turns", of one category if asked."""
    wanted, category, rows = options.length(options.spec_bench_output_len), options.spec_bench_category, []
    for where, entry in _read_lines(options.dataset_path):
        turns = entry.get("turns")
        if not isinstance(turns, list) or not turns:
            raise ConfigError(f"{where}: must have a list of 'turns', found {list(entry)}.")
        if not category or entry.get("category") == category:
            rows.append((str(turns[0]), _count(entry, "output_tokens", where) if wanted == -1 else wanted))
    return _questions(rows, options, tokenizer)


def burstgpt(options: DataOptions, tokenizer: Tokenizer) -> list[Sample]:
    """BurstGPT's CSV: lengths of GPT-4 requests that were answered, with made-up texts."""
    path, pairs = options.dataset_path, []
    for number, row in enumerate(csv.DictReader(_read(path).splitlines()), 2):
        try:
            if row["Model"] == "GPT-4" and int(row["Response tokens"]) > 0:
                pairs.append((int(row["Request tokens"]), int(row["Response tokens"])))
        except (KeyError, ValueError, TypeError) as error:
            raise ConfigError(f"{path}, line {number}: not a row of BurstGPT ({error}).") from None
    if not pairs:
        return []
    draw, count = np.random.default_rng(options.seed), options.num_prompts
    chosen = draw.choice(len(pairs), size=count, replace=count > len(pairs))
    maker = TextMaker(tokenizer, options.seed)
    return [
        Sample(tokenizer.decode(maker.run_of_ids(index, length)), length, options.length(wanted))
        for index, (length, wanted) in enumerate(pairs[i] for i in chosen)
    ]


def timed_trace(options: DataOptions, tokenizer: Tokenizer) -> list[Sample]:
    """A trace: when requests came, how long they were, and hash ids of their blocks of tokens.

    Equal ids become equal tokens, so that the trace's shared prefixes stay shared. `octavo serve
    --record-trace` writes this format. Prompts are token ids. Times count from the first request.
    """
    labels = options
    samples: list[Sample] = []
    for where, entry in _read_lines(options.dataset_path):
        if len(samples) == options.num_prompts:
            break
        length = _count(entry, labels.timed_trace_label_input_length, where)
        wanted = _count(entry, labels.timed_trace_label_output_length, where)
        at = entry.get(labels.timed_trace_label_timestamp)
        if not isinstance(at, int | float):
            name = labels.timed_trace_label_timestamp
            raise ConfigError(f"{where}: needs a number {name!r}, found {at!r}; fields: {list(entry)}.")
        if not 0 <= at < float("inf"):
            raise ConfigError(f"{where}: the time {at} must be finite and not negative.")
        hashes = entry.get(labels.timed_trace_label_hash_ids) or []
        ids = _ids_of_trace(hashes, length, options, tokenizer)
        seconds = float(at) * options.timed_trace_sec_multiplier
        samples.append(Sample(ids, len(ids), options.length(wanted), seconds))
    samples.sort(key=lambda sample: sample.timestamp or 0.0)
    first_s = samples[0].timestamp or 0.0 if samples else 0.0
    return [replace(sample, timestamp=(sample.timestamp or 0.0) - first_s) for sample in samples]


def _ids_of_trace(hashes: list[Any], length: int, options: DataOptions, tokenizer: Tokenizer) -> list[int]:
    """A run of tokens per hash; what the hashes do not cover is one run more, of the last hash."""
    size, special = options.timed_trace_chunk_hash_size, tokenizer.special_ids
    ids: list[int] = []
    for place in range(-(-length // size)):
        key = hashes[place] if place < len(hashes) else f"{hashes[-1:]}+{place}"
        draw = np.random.default_rng([*str(key).encode(), options.seed])
        drawn = draw.integers(0, tokenizer.vocab_size, size=2 * size).tolist()
        ids += [i for i in drawn if i not in special][:size]
    return ids[:length]


def _questions(rows: list[tuple[str, int]], options: DataOptions, tokenizer: Tokenizer) -> list[Sample]:
    rows = rows if options.disable_shuffle else shuffled(rows, options.seed)
    template = None if options.skip_chat_template else tokenizer.chat_template
    samples = []
    for prompt, output_len in rows[: options.num_prompts]:
        text = prompt
        if template:
            talk = [{"role": "user", "content": prompt}]
            text = str(tokenizer.apply_chat_template(talk, tokenize=False, **options.chat_template_kwargs))
        samples.append(Sample(text, len(tokenizer.encode(text)), output_len))
    return samples


def _text(entry: dict[str, Any], name: str, where: str) -> str:
    if not isinstance(value := entry.get(name), str):
        raise ConfigError(f"{where}: needs a text {name!r}, found {value!r}; fields: {list(entry)}.")
    return value


def _count(entry: dict[str, Any], name: str, where: str) -> int:
    value = entry.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1 or value < 1:
        raise ConfigError(
            f"{where}: needs a whole number {name!r} of at least 1, found {value!r}; fields: {list(entry)}."
        )
    return int(value)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset-path {path} cannot be read: {error}") from error


def _read_json(path: str) -> Any:
    try:
        return json.loads(_read(path))
    except ValueError as error:
        raise ConfigError(f"--dataset-path {path} is not JSON: {error}") from None


def _read_lines(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where each entry stands, and the entry. Empty lines are skipped."""
    for number, line in enumerate(_read(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        if not isinstance(entry, dict):
            raise ConfigError(f"{path}, line {number}: must be a JSON object, found {line:.60}")
        yield f"{path}, line {number}", entry
