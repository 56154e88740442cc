"""`DataOptions`: which requests a benchmark sends. Flags of the same names are made of its fields."""

import uuid
from dataclasses import dataclass, field
from typing import Any

from octavo.config.option import option

NAMES = "random, random-rerank, prefix_repetition, sharegpt, custom, spec_bench, burstgpt, timed_trace"


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """What is asked."""

    dataset_name: str = option("random", f"One of {NAMES}.")
    dataset_path: str = option(
        "", "File of the data set: sharegpt JSON, burstgpt CSV, the others JSON lines."
    )
    num_prompts: int = option(1000, "Number of requests.")
    seed: int = option(0, "Of everything that is drawn.")
    disable_shuffle: bool = option(False, "Take a file's requests in their order.")
    oversample: bool = option(True, "Draw again from a file that has too few requests.")
    skip_chat_template: bool = option(False, "Send the prompts of custom and spec_bench as they are.")
    chat_template_kwargs: dict[str, Any] = option({}, "Variables of that chat template.")
    input_len: int = option(0, "Input tokens; the same as --random-input-len.")
    output_len: int = option(0, "Output tokens, of any data set.")
    random_input_len: int = option(1024, "Input tokens of random requests.")
    random_output_len: int = option(128, "Output tokens of random requests.")
    random_range_ratio: str = option(
        "0.0", 'Spread of these lengths, [0, 1): a number, or {"input": 0.3, "output": 0.5}.'
    )
    random_prefix_len: int = option(0, "Tokens that all random requests begin with, besides their input.")
    random_batch_size: int = option(1, "Inputs per request, for embeddings and reranking.")
    reranker: bool = option(True, "--no-reranker: the model scores by embeddings, not pairs.")
    custom_output_len: int = option(256, "Output tokens of custom requests; -1 = what the file says.")
    spec_bench_output_len: int = option(256, "Output tokens of spec_bench requests; -1 = what the file says.")
    spec_bench_category: str = option("", "Only questions of this category.")
    sharegpt_output_len: int = option(0, "Output tokens of sharegpt requests; 0 = as in the file.")
    prefix_repetition_prefix_len: int = option(256, "Tokens of a prefix.")
    prefix_repetition_suffix_len: int = option(256, "Tokens behind it, new in every request.")
    prefix_repetition_num_prefixes: int = option(10, "Different prefixes.")
    prefix_repetition_output_len: int = option(128, "Output tokens.")
    timed_trace_chunk_hash_size: int = option(16, "Tokens that one hash id of a trace stands for.")
    timed_trace_sec_multiplier: float = option(
        1.0, "Seconds in a unit of a trace's times; 0.001 = milliseconds."
    )
    timed_trace_label_timestamp: str = option("timestamp", "Field of the time.")
    timed_trace_label_input_length: str = option("input_length", "Field of the input tokens.")
    timed_trace_label_output_length: str = option("output_length", "Field of the output tokens.")
    timed_trace_label_hash_ids: str = option("hash_ids", "Field of the hash ids.")
    request_id_prefix: str = field(
        default_factory=lambda: f"bench-{uuid.uuid4().hex[:8]}-",
        metadata={"explain": "Beginning of request ids.", "choices": (), "words": {}},
    )

    def length(self, own: int) -> int:
        """Output tokens: --output-len, else the data set's own option."""
        return self.output_len or own
