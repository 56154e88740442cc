"""`Lookahead`: what the scheduler computes ahead of the last known tokens, if the options ask for that."""

from collections.abc import Mapping, Sequence

from octavo.config.scheduling import SchedulerConfig
from octavo.config.speculative import speculation
from octavo.engine.kvcache.manager import KVCacheManager
from octavo.engine.scheduler.plan import StepPlan
from octavo.engine.scheduler.request import Request
from octavo.engine.speculation.drafting import Drafting
from octavo.messages.request import SchedulerStats
from octavo.messages.step import ModelRunnerOutput


class Lookahead:
    """Puts drafts into steps, where there is room for them."""

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager) -> None:
        self._kv = kv
        wanted = speculation(config.speculative_config)
        self.drafting = Drafting(wanted, config.max_num_seqs) if wanted else None

    def begin(self, running: Sequence[Request]) -> Mapping[Request, list[int]]:
        """Return the drafts of the next step; with none, requests of which a step verifies some now."""
        if self.drafting is None:
            return {}
        return self.drafting.propose(running) | {other: [] for other in running if other.awaits_length}

    def extend(self, plan: StepPlan, request: Request, drafts: list[int], num_behind: int) -> None:
        """Add the drafts of `request`, which is added next, as far as nobody behind it goes short.

        num_behind: running requests that are still to be served
        """
        table = request.table
        assert table is not None
        drafts = drafts[: max(0, plan.num_tokens_left - num_behind - 1)]
        matchers = request.matcher.follow(drafts) if request.matcher is not None else []
        drafts = drafts if request.matcher is None else drafts[: len(matchers)]
        num_computed, num_new = request.num_computed, 1 + len(drafts)
        if drafts and num_computed + num_new > table.capacity:
            is_short = self._kv.pool.num_free <= num_behind + num_new
            new_blocks = None if is_short else self._kv.reserve(table, num_computed, num_new)
            if new_blocks is None:
                return
            plan.new_blocks[len(plan.requests)] = new_blocks
        if drafts:
            plan.add_drafts(request, drafts, matchers)

    def learn(self, plan: StepPlan, result: ModelRunnerOutput, took_s: float) -> None:
        """Take note of a step that was read."""
        if self.drafting is not None:
            self.drafting.learn(plan, result, took_s)

    def count(self, stats: SchedulerStats) -> None:
        """Enter what was guessed since the start."""
        if self.drafting is not None:
            self.drafting.count(stats)
