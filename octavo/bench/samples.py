"""`Sample`: one request of a benchmark. `load_samples`: the requests of a data set, by vLLM's names.

Called by the benchmarks before the clock starts. Prompts are texts, or token ids where lengths must be exact.
The shapes of the generated sets follow `vllm bench`, so that figures compare.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from octavo.base.errors import ConfigError, did_you_mean
from octavo.bench import files, generated
from octavo.bench.data_options import DataOptions
from octavo.bench.generated import Sample
from octavo.frontend.text.tokenizer import Tokenizer

Loader = Callable[[DataOptions, Tokenizer], list[Sample]]

DATASETS: dict[str, Loader] = {
    "random": generated.random_texts,
    "random-rerank": generated.random_rerank,
    "prefix_repetition": generated.prefix_repetition,
    "sharegpt": files.sharegpt,
    "custom": files.custom,
    "spec_bench": files.spec_bench,
    "burstgpt": files.burstgpt,
    "timed_trace": files.timed_trace,
}
GENERATED = ("random", "random-rerank", "prefix_repetition")
_UNLIKE_FILES = ("burstgpt", "timed_trace", *GENERATED)
"""Sets that are never filled up by drawing their requests again."""


def load_samples(options: DataOptions, tokenizer: Tokenizer) -> list[Sample]:
    """Return `num_prompts` requests, each with an id of its own.

    A file with fewer is filled up by drawing from it again, unless `oversample` is off. Raises ConfigError
    for a set that is unknown, a file that is missing or malformed, and lengths that cannot be.
    """
    name = options.dataset_name
    if name not in DATASETS:
        near = did_you_mean(name, DATASETS)
        raise ConfigError(f"--dataset-name {name!r} is none of {', '.join(DATASETS)}.{near}")
    if name in GENERATED and options.dataset_path:
        raise ConfigError(
            f"Cannot use '{name}' dataset with --dataset-path. Choose the --dataset-name of the file "
            f"{options.dataset_path}: {', '.join(n for n in DATASETS if n not in GENERATED)}."
        )
    if name not in GENERATED and not options.dataset_path:
        raise ConfigError(f"--dataset-name {name} needs a file: --dataset-path.")
    if options.num_prompts < 1:
        raise ConfigError(f"--num-prompts must be at least 1, got {options.num_prompts}.")
    samples = DATASETS[name](options, tokenizer)
    if not samples:
        raise ConfigError(f"No request of {options.dataset_path} can be used: all are too long or too short.")
    if options.oversample and name not in _UNLIKE_FILES:
        draw = np.random.default_rng(options.seed)
        missing = options.num_prompts - len(samples)
        samples += [samples[i] for i in draw.integers(0, len(samples), size=max(0, missing))]
    return [replace(s, request_id=f"{options.request_id_prefix}{i}") for i, s in enumerate(samples)]
