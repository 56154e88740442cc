"""What a running server says of itself at /metrics: counters, gauges and histograms, as numbers.

`bench serve` reads the speculative-decoding counters around a run, `octavo doctor --url` the whole page.
Names come without their prefix (`vllm:` or `octavo:`): any server that uses vLLM's names is understood.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from octavo.base.errors import OctavoError
from octavo.bench.client import Target
from octavo.metrics import Counter, Gauge, Histogram, Metric

PATH = "/metrics"


@dataclass
class Page:
    """The figures of one moment; series of the same name are summed."""

    values: dict[str, float] = field(default_factory=dict)
    """Counters and gauges, by name (counters without _total); of histograms the _sum and _count."""
    by_label: dict[str, dict[str, float]] = field(default_factory=dict)
    """The same by the values of their own labels (all but model_name and engine), joined with commas."""

    def get(self, name: str) -> float:
        """Return a figure, 0 if the server has none."""
        return self.values.get(name, 0.0)

    def mean(self, name: str, before: "Page") -> float | None:
        """Return the mean of what a histogram took in since `before`, None if that is nothing."""
        count = self.get(f"{name}_count") - before.get(f"{name}_count")
        return (self.get(f"{name}_sum") - before.get(f"{name}_sum")) / count if count > 0 else None

    def since(self, name: str, before: "Page") -> float:
        """Return how much a counter grew."""
        return self.get(name) - before.get(name)


async def read_page(target: Target) -> Page:
    """Return the server's figures; an empty page if it shows none."""
    try:
        return parse_page(await target.get(PATH))
    except OctavoError:
        return Page()


def parse_page(text: str) -> Page:
    """Return the figures of a page in Prometheus' format; an empty page if it is none."""
    values: dict[str, float] = defaultdict(float)
    by_label: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = sample.name.rpartition(":")[2].removesuffix("_total")
                values[name] += sample.value
                own = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
                by_label[name][",".join(own.values())] += sample.value
    except ValueError:
        return Page()
    return Page(dict(values), {name: dict(series) for name, series in by_label.items()})


def page_of(metrics: Iterable[Metric]) -> Page:
    """Return the figures of an engine in this process, as of `LLM.get_metrics`."""
    values: dict[str, float] = defaultdict(float)
    for metric in metrics:
        name = metric.name.rpartition(":")[2]
        if isinstance(metric, Counter | Gauge):
            values[name] += metric.value
        elif isinstance(metric, Histogram):
            values[f"{name}_sum"] += metric.sum
            values[f"{name}_count"] += metric.count
    return Page(dict(values))


def speculation(before: Page, after: Page) -> Mapping[str, Any]:
    """Return `vllm bench serve`'s fields about drafts between two pages; {} when nothing was drafted."""
    prefix = "spec_decode_num_"
    drafts, tokens, accepted = (
        int(after.since(prefix + name, before)) for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    if drafts <= 0 or tokens <= 0:
        return {}
    old, new = (page.by_label.get(prefix + "accepted_tokens_per_pos", {}) for page in (before, after))
    rates = [(new.get(place, 0) - old.get(place, 0)) / drafts for place in sorted(new, key=int)]
    return {
        "spec_decode_acceptance_rate": 100 * accepted / tokens,
        "spec_decode_acceptance_length": 1 + accepted / drafts,
        "spec_decode_num_drafts": drafts,
        "spec_decode_draft_tokens": tokens,
        "spec_decode_accepted_tokens": accepted,
        "spec_decode_per_position_acceptance_rates": rates,
    }
