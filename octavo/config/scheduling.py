"""How requests share the steps."""

import sys
from dataclasses import dataclass
from typing import Any

from octavo.config.option import Concern, option
from octavo.config.speculative import speculation

_MOST_ROWS = 256
"""Of steps with drafts, where no more requests run."""


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(metaclass=Concern):
    """Bounds of one step and the order of waiting requests."""

    max_num_seqs: int = option(0, "Maximum number of requests running at once; 0 = by device.")
    max_num_batched_tokens: int = option(0, "Maximum number of tokens computed in one step; 0 = by device.")
    enable_chunked_prefill: bool = option(True, "Split prompts that do not fit the step's token budget.")
    long_prefill_token_threshold: int = option(
        0, "Maximum number of tokens of one prompt per step; 0 = the token budget."
    )
    scheduling_policy: str = option(
        "fcfs",
        "Order of requests: fcfs, priority, deadline, fair (among tenants), lpm (longest cached prefix) "
        "or a plug-in's name.",
    )
    priority_aging_s: float = option(
        0.0, "Seconds of waiting that improve a request's priority by one; 0 = no aging."
    )
    fair_weights: dict[str, float] = option(
        {}, "Share of each tenant under the policy 'fair', 1 if not named."
    )
    max_request_seconds: float = option(
        0.0, "Seconds from arrival after which any request ends with the text so far; 0 = no limit."
    )
    speculative_config: dict[str, Any] = option(
        {},
        "Guess the next tokens and compute several in one step, without changing a text: an object with "
        "method (ngram, ngram_gpu, suffix, jump_ahead, draft_model, medusa, mlp_speculator, eagle, eagle3, "
        "mtp, dflash), model and num_speculative_tokens, as in vLLM.",
    )
    spec_method: str = option("", "Short for the method of speculative_config.")
    spec_model: str = option("", "Short for the model of speculative_config, which guesses tokens.")
    spec_tokens: int = option(
        -1, "Short for the num_speculative_tokens of speculative_config; -1 = not given."
    )
    max_loras: int = option(8, "Maximum number of different LoRA adapters in one step.")
    steps_in_flight: int = option(0, "Steps given to the device before a result is read; 0 = by device.")

    @property
    def max_num_rows(self) -> int:
        """Return the most rows of a decoding step: one for each request, and so many for drafts."""
        if (wanted := speculation(self.speculative_config)) is None:
            return self.max_num_seqs
        return max(self.max_num_seqs, min(_MOST_ROWS, self.max_num_seqs * (1 + wanted.most)))

    @property
    def max_chunk(self) -> int:
        """Return the most tokens of one request in one step."""
        return min(self.long_prefill_token_threshold or sys.maxsize, self.max_num_batched_tokens)
