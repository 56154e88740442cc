"""Scheduling policies by name: who comes first among the waiting, who gives way last among the running."""

from octavo.base.registry import Registry
from octavo.engine.scheduler.policies.interface import Policy

POLICIES: Registry[type[Policy]] = Registry(
    "scheduling policy",
    {
        "deadline": "octavo.engine.scheduler.policies.deadline:EarliestDeadlineFirst",
        "fair": "octavo.engine.scheduler.policies.fair:FairShares",
        "fcfs": "octavo.engine.scheduler.policies.fcfs:FirstComeFirstServed",
        "lpm": "octavo.engine.scheduler.policies.lpm:LongestPrefixFirst",
        "priority": "octavo.engine.scheduler.policies.priority:PriorityFirst",
    },
)
