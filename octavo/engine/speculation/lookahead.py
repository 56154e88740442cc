"""`Lookahead`: what the scheduler computes ahead of the last known tokens, if the options ask for that."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from octavo.base.log import get_logger
from octavo.config.scheduling import SchedulerConfig
from octavo.config.speculative import BY_WORKERS, speculation
from octavo.engine.kvcache.manager import KVCacheManager
from octavo.engine.scheduler.plan import StepPlan
from octavo.engine.scheduler.request import Request
from octavo.engine.speculation.drafting import Drafting
from octavo.engine.speculation.workers_drafting import WorkersDrafting
from octavo.messages.request import SchedulerStats
from octavo.messages.step import ModelRunnerOutput

logger = get_logger(__name__)


class Lookahead:
    """Puts drafts into steps, where there is room for them."""

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager, num_stages: int = 1) -> None:
        """num_stages: of more than one, the first would not know which drafts came true."""
        self._kv = kv
        wanted = speculation(config.speculative_config)
        is_remote = wanted is not None and wanted.method in BY_WORKERS
        kind = WorkersDrafting if is_remote else Drafting
        self._runs_ahead = num_stages == 1 and config.steps_in_flight == 2
        self.drafting = kind(wanted, config.max_num_rows, runs_ahead=self._runs_ahead) if wanted else None
        self._rates, self._noise = np.array(wanted.rates if wanted else ()), np.random.default_rng(0)
        if self._rates.size:
            logger.warning(
                "Synthetic acceptance: drafts are taken though they are wrong. For benchmarks only!"
            )
        self._num_ahead = wanted.num_ahead if wanted is not None else 0
        """Positions behind a step for which the workers should find blocks."""
        self._is_awaited: bool | None = None
        self._waiting: set[Request] = set()
        """With several stages: who waits for tokens in flight, because drafts behind them are worth it."""
        self._has_stages = num_stages > 1

    def awaits_results(self, running: Iterable[Request]) -> bool:
        """See Drafting; asked often between two steps."""
        if self.drafting is None:
            return False
        if self._is_awaited is None:
            self._is_awaited = self.drafting.awaits_results(list(running))
        return self._is_awaited

    def begin(self, running: Sequence[Request]) -> Mapping[Request, list[int]]:
        """Return the drafts of the next step; with none, requests of which a step verifies some now."""
        if self.drafting is None:
            return {}
        if self._has_stages and not self._num_ahead:
            pending = (request for request in running if request.num_in_flight)
            self._waiting = self.drafting.awaited(pending, len(running))
        others = {other: list[int]() for other in running if other.num_unsure or self._num_ahead}
        others |= {other: list[int]() for other in self._waiting}
        return others | self.drafting.propose(running)

    def extend(self, plan: StepPlan, request: Request, drafts: list[int], num_behind: int) -> bool:
        """Add the drafts of `request`, which is added next, as far as nobody behind it goes short.

        Return False if it has to wait until it is known what the steps in flight bring: also what was guessed
        behind them, or what a grammar allows, because guessing begins with chosen tokens.
        num_behind: running requests that are still to be served
        """
        table, num_unsure = request.table, request.num_unsure
        assert table is not None
        is_asked = request.num_asked or request.matcher is not None
        waits = self._num_ahead and not self._runs_ahead and request.num_pending and is_asked
        if waits or request in self._waiting or (num_unsure and not self._may_run_ahead(request)):
            return False
        if request.num_tokens >= request.max_total_tokens:
            return True  # it will get no part of this step
        rooms = (group.num_drafts(request.num_computed, num_unsure) for group in self._kv.groups)
        drafts = drafts[: max(0, min(*rooms, plan.num_tokens_left - num_behind - 1))]
        matchers = request.matcher.follow(drafts) if request.matcher is not None else []
        drafts = drafts if request.matcher is None else drafts[: len(matchers)]
        num_computed, num_new = request.num_computed, num_unsure + 1 + len(drafts)
        num_left = request.max_total_tokens - 1 - num_computed - num_new
        # Who computes more than its last token may still get other blocks, or none.
        is_next = request.num_tokens == num_computed + 1
        num_wanted = num_new + max(0, min(self._num_ahead, num_left)) * is_next
        if num_wanted > 1 and num_computed + num_wanted > table.capacity:
            is_short = self._kv.pool.num_free <= num_behind + num_wanted
            new_blocks = None if is_short else self._kv.reserve(table, num_computed, num_wanted)
            if new_blocks is not None:
                plan.new_blocks[len(plan.requests)] = new_blocks
            elif num_computed + num_new > table.capacity:
                if num_computed + num_unsure >= table.capacity and num_unsure:
                    return False
                drafts = []
        if num_unsure:
            plan.unread.append(len(plan.requests))
        if drafts:
            if self._rates.size:
                plan.num_taken[len(plan.requests)] = int(
                    (self._rates[: len(drafts)] > self._noise.random()).sum()
                )
            plan.add_drafts(request, drafts, matchers)
        return True

    def _may_run_ahead(self, request: Request) -> bool:
        """Return True if it may be planned though it is not known how many drafts come true."""
        is_over = request.num_computed + request.num_unsure + 1 >= request.max_total_tokens
        return self._runs_ahead and request.matcher is None and not is_over

    def finish(self, plan: StepPlan) -> None:
        """Say how many tokens the workers shall guess behind a step that is planned."""
        self._is_awaited = None
        if self.drafting is not None:
            plan.tells_drafts = not self._runs_ahead
            plan.num_drafts = self.drafting.counts_behind(plan)

    def learn(self, plan: StepPlan, result: ModelRunnerOutput, took_s: float) -> None:
        """Take note of a step that was read."""
        self._is_awaited = None
        if self.drafting is not None:
            self.drafting.learn(plan, result, took_s)

    def count(self, stats: SchedulerStats) -> None:
        """Enter what was guessed since the start."""
        if self.drafting is not None:
            self.drafting.count(stats)
