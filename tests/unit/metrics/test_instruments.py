"""Counters, gauges, histograms: against counting by hand and against Prometheus' definition of a bucket."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.metrics import Counter, Gauge, Histogram, Vector
from octavo.metrics.collection import Collection
from octavo.metrics.names import METRICS, PREFIX


@given(
    values=st.lists(st.floats(0, 30), max_size=40),
    bounds=st.lists(st.sampled_from([0.5, 1.0, 2.5, 10.0, 20.0]), min_size=1, unique=True).map(sorted),
)
def test_a_bucket_counts_what_is_not_above_it(values, bounds):
    histogram = Histogram("h", {}, tuple(bounds))
    for value in values:
        histogram.observe(value)
    expected = {str(float(bound)): sum(value <= bound for value in values) for bound in bounds}
    assert histogram.buckets == expected | {"+Inf": len(values)}
    assert (histogram.count, histogram.sum) == (len(values), pytest.approx(sum(values)))


def test_snapshots_stay_as_they_were():
    series = [Counter("c", {"a": "b"}), Gauge("g", {}), Vector("v", {}), Histogram("h", {}, (1.0,))]
    counter, gauge, vector, histogram = series
    copies = [metric.copy() for metric in series]
    counter.add()
    counter.add(4)
    gauge.set(2.5)
    vector.add(2)
    histogram.observe(3)
    assert (counter.value, gauge.value, vector.values, histogram.count) == (5, 2.5, [0, 0, 1], 1)
    assert [copies[0].value, copies[1].value, copies[2].values, copies[3].count] == [0, 0.0, [], 0]
    assert [(type(c), c.name, c.labels) for c in copies] == [(type(m), m.name, m.labels) for m in series]


def test_series_are_told_apart_by_labels():
    every = Collection(model_name="m")
    every.counter("request_success", finished_reason="stop").add()
    every.counter("request_success", finished_reason="length").add(2)
    every.counter("request_success", finished_reason="stop").add()
    every.counter("prompt_tokens").add(7)
    snapshot = every.snapshot()
    assert [(m.name, m.labels, m.value) for m in snapshot] == [
        (PREFIX + "prompt_tokens", {"model_name": "m"}, 7),
        (PREFIX + "request_success", {"model_name": "m", "finished_reason": "length"}, 2),
        (PREFIX + "request_success", {"model_name": "m", "finished_reason": "stop"}, 2),
    ]


def test_the_table_is_in_order():
    for name, row in METRICS.items():
        assert row.explain.endswith("."), name
        assert list(row.buckets) == sorted(set(row.buckets)), name
        assert bool(row.buckets) == (row.kind is Histogram), name


def test_fields_are_those_that_readers_know():
    assert [f.name for f in dataclasses.fields(Counter)] == ["name", "labels", "value"]
    assert [f.name for f in dataclasses.fields(Gauge)] == ["name", "labels", "value"]
    assert [f.name for f in dataclasses.fields(Vector)] == ["name", "labels", "values"]
