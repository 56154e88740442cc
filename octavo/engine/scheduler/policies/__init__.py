"""Scheduling policies by name: who comes first among the waiting, who gives way last among the running."""

from octavo.base.registry import Registry
from octavo.engine.scheduler.policies.interface import Policy

POLICIES: Registry[type[Policy]] = Registry(
    "scheduling policy",
    {
        "deadline": "octavo.engine.scheduler.policies.orders:EarliestDeadlineFirst",
        "fair": "octavo.engine.scheduler.policies.fair:FairShares",
        "fcfs": "octavo.engine.scheduler.policies.orders:FirstComeFirstServed",
        "lpm": "octavo.engine.scheduler.policies.orders:LongestPrefixFirst",
        "priority": "octavo.engine.scheduler.policies.orders:PriorityFirst",
    },
)
