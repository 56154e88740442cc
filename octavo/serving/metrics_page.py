"""GET /metrics: every metric of the table in Prometheus' text form, or OpenMetrics for those who ask for it.

A name is there from the start, its series as soon as they have something to say.
"""

from collections.abc import Iterable, Iterator

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from octavo.config.server import ServerConfig
from octavo.metrics import Counter, Gauge, Histogram, Metric
from octavo.metrics.names import ALIASES, METRICS, PREFIX, Description
from octavo.serving.metrics_board import MetricsBoard
from octavo.serving.registry import Route

_FAMILIES = {Counter: CounterMetricFamily, Gauge: GaugeMetricFamily, Histogram: HistogramMetricFamily}
_PREFIXES = {"vllm": (PREFIX,), "octavo": ("octavo:",), "both": (PREFIX, "octavo:")}


async def metrics(request: Request) -> Response:
    """All metrics, for Prometheus."""
    board: MetricsBoard = request.app.state.metrics_board
    config: ServerConfig = request.app.state.config
    encode, media_type = choose_encoder(request.headers.get("accept", ""))
    page = _Page(await board.read(), _PREFIXES[config.metric_names])
    return Response(encode(page), headers={"Content-Type": media_type, "Cache-Control": "no-store"})


class _Page(Collector):
    """One reading in the words of the client library."""

    def __init__(self, snapshot: Iterable[Metric], prefixes: tuple[str, ...]) -> None:
        self._prefixes = prefixes
        self._series: dict[str, list[Metric]] = {row.prefix + name: [] for name, row in METRICS.items()}
        for metric in snapshot:
            self._series[metric.name].append(metric)

    def collect(self) -> Iterator[Family]:
        for name, row in METRICS.items():
            series = self._series[row.prefix + name]
            for prefix in self._prefixes if row.prefix else ("",):
                yield _family(prefix + name, row, series)
        for alias, name in ALIASES.items():
            yield _family(alias, METRICS[name], self._series[PREFIX + name])


def _family(name: str, row: Description, series: list[Metric]) -> Family:
    family: Family = _FAMILIES[row.kind](name, row.explain)
    for metric in series:
        match metric:
            case Counter(value=value):
                family.add_sample(f"{name}_total", metric.labels, value)
            case Gauge(value=value):
                family.add_sample(name, metric.labels, value)
            case Histogram():
                for limit, count in metric.buckets.items():
                    family.add_sample(f"{name}_bucket", metric.labels | {"le": limit}, count)
                family.add_sample(f"{name}_count", metric.labels, metric.count)
                family.add_sample(f"{name}_sum", metric.labels, metric.sum)
    return family


ROUTES = [Route("/metrics", metrics, media_type="text/plain")]
