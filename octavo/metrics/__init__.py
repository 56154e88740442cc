"""What an engine counts: plain objects with vLLM's names and fields, without a Prometheus library."""

from octavo.metrics.instruments import Counter, Gauge, Histogram, Metric, Vector, in_vectors

__all__ = ["Counter", "Gauge", "Histogram", "Metric", "Vector", "in_vectors"]
