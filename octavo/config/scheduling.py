"""How requests share the steps."""

from dataclasses import dataclass

from octavo.config.option import option


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Bounds of one step and the order of waiting requests."""

    max_num_seqs: int = option(0, "Most requests running at once; 0 = by device.")
    max_num_batched_tokens: int = option(0, "Most tokens computed in one step; 0 = by device.")
    enable_chunked_prefill: bool = option(True, "Split prompts that do not fit the step's token budget.")
    long_prefill_token_threshold: int = option(0, "Most tokens of one prompt per step; 0 = the token budget.")
    scheduling_policy: str = option("fcfs", "Order of waiting requests: fcfs, priority, or a plug-in's name.")
    steps_in_flight: int = option(0, "Steps given to the device before a result is read; 0 = by device.")
    max_num_queued_reqs: int = option(0, "Waiting requests above which new ones are refused; 0 = unbounded.")
