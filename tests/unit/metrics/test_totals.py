"""Sums over processes: against adding up by hand, and never falling, whoever is asked."""

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.metrics import Counter, Gauge, Histogram
from octavo.metrics.names import PREFIX
from octavo.metrics.totals import Totals


def counter(name, value, **labels):
    return Counter(PREFIX + name, labels, value)


def found(snapshot, name, **labels):
    [metric] = [m for m in snapshot if m.name == PREFIX + name and m.labels == labels]
    return metric


def test_parts_are_added_and_gauges_are_not(tmp_path):
    one, two = Totals(tmp_path, 1), Totals(tmp_path, 2)
    histogram = Histogram(PREFIX + "request_params_n", {}, (1.0, 2.0), 3.0, [1, 1, 0])
    one.publish(
        [counter("prompt_tokens", 5), counter("request_success", 1, finished_reason="stop"), histogram]
    )
    own = [
        counter("prompt_tokens", 7),
        counter("request_success", 2, finished_reason="length"),
        Histogram(PREFIX + "request_params_n", {}, (1.0, 2.0), 9.0, [0, 0, 1]),
        Gauge(PREFIX + "num_requests_running", {}, 3.0),
    ]
    two.publish(own)
    total = two.read(own)
    assert found(total, "prompt_tokens").value == 12
    assert found(total, "request_success", finished_reason="stop").value == 1
    assert found(total, "request_success", finished_reason="length").value == 2
    assert found(total, "num_requests_running").value == 3.0
    summed = found(total, "request_params_n")
    assert (summed.sum, summed.buckets) == (12.0, {"1.0": 1, "2.0": 2, "+Inf": 3})


def test_what_the_core_tells_everybody_counts_once(tmp_path):
    for pid, value in ((1, 40), (2, 38)):  # one is a step behind
        Totals(tmp_path, pid).publish([counter("num_preemptions", value), counter("prompt_tokens", value)])
    total = Totals(tmp_path, 2).read([])
    assert found(total, "num_preemptions").value == 40
    assert found(total, "prompt_tokens").value == 78


@settings(max_examples=50, deadline=None)
@given(
    events=st.lists(
        st.tuples(st.sampled_from(["count", "publish", "ask", "die"]), st.integers(0, 2)), max_size=40
    )
)
def test_totals_never_fall_and_lose_nothing_that_was_shown(events, tmp_path_factory):
    """Processes count, publish, are asked and replaced in any order."""
    folder = tmp_path_factory.mktemp("totals")
    counted, pids, shown, next_pid = [0, 0, 0], [0, 1, 2], 0, 3
    for event, n in events:
        own = [counter("generation_tokens", counted[n])]
        totals = Totals(folder, pids[n] + 1)
        if event == "count":
            counted[n] += 1
        elif event == "publish":
            totals.publish(own)
        elif event == "ask":
            totals.publish(own)
            value = found(totals.read(own), "generation_tokens").value
            assert value >= max(shown, counted[n])
            shown = value
        else:
            counted[n], pids[n], next_pid = 0, next_pid, next_pid + 1
