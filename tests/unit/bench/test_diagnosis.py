"""What holds a server back, told from two pages of its metrics."""

import pytest

from octavo.bench.diagnosis import diagnose
from octavo.bench.server_metrics import Page, parse_page
from octavo.cli.main import main
from tests.timed_server import TimedServer

CPU = {
    "num_requests_running": 8.0,
    "num_requests_waiting": 0.0,
    "max_num_requests_running": 16.0,
    "kv_cache_usage_perc": 0.4,
    "num_preemptions": 0.0,
    "iteration_tokens_total_count": 0.0,
    "iteration_tokens_total_sum": 0.0,
    "generation_tokens": 0.0,
    "request_queue_time_seconds_count": 0.0,
    "request_queue_time_seconds_sum": 0.0,
    "cpu_utilization": 3.9,
}


def bound(tokens_per_step=8.0, *, num_steps=100, **changes):
    last = CPU | {"iteration_tokens_total_count": num_steps, "generation_tokens": 400.0} | changes
    last["iteration_tokens_total_sum"] = num_steps * tokens_per_step
    first = CPU | {name: value for name, value in changes.items() if name != "num_preemptions"}
    found = diagnose([Page(first), Page(last), Page(last)], 5.0, idle_cores=0.1)
    assert found.text and found.advice and len(found.lines()) == 3
    return found.bound


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_steps": 0, "num_requests_running": 0.0}, "idle"),
        ({}, "bandwidth"),
        ({"tokens_per_step": 500}, "compute"),
        ({"num_preemptions": 3.0}, "kv"),
        ({"kv_cache_usage_perc": 0.95, "num_requests_waiting": 5.0}, "kv"),
        ({"num_requests_waiting": 5.0, "num_requests_running": 16.0}, "queue"),
        ({"num_requests_waiting": 5.0}, "bandwidth"),
        ({"gpu_utilization": 0.3}, "host"),
        ({"gpu_utilization": 0.9, "tokens_per_step": 100}, "bandwidth"),
        ({"gpu_utilization": 0.9, "tokens_per_step": 400}, "compute"),
    ],
)
def test_each_kind(changes, expected):
    assert bound(**changes) == expected


def test_idle_cores_are_the_hosts_fault():
    pages = [Page(CPU | {"cpu_utilization": 1.0, "iteration_tokens_total_count": n}) for n in (0.0, 9.0)]
    assert diagnose(pages, 1.0, idle_cores=3.0).bound == "host"
    assert diagnose(pages, 1.0, idle_cores=0.2).bound == "bandwidth"  # others have the cores that it has not
    assert diagnose(pages, 1.0).bound == "bandwidth"  # of an unknown machine nothing is said


def test_pages_are_read_under_either_prefix():
    for prefix in ("vllm", "octavo"):
        text = (
            f"# TYPE {prefix}:generation_tokens counter\n"
            f'{prefix}:generation_tokens_total{{engine="0"}} 3\n'
            f'{prefix}:generation_tokens_total{{engine="1"}} 4\n'
            f'# TYPE {prefix}:gpu_utilization gauge\n{prefix}:gpu_utilization{{gpu="0"}} 0.5\n'
        )
        page = parse_page(text)
        assert page.get("generation_tokens") == 7 and page.by_label["gpu_utilization"] == {"0": 0.5}
    assert parse_page("<html>{").values == {} and parse_page("").values == {}


def test_the_doctor_watches_a_server(capsys):
    page = "\n".join(f"# TYPE vllm:{name} gauge\nvllm:{name} {value}" for name, value in CPU.items())
    with TimedServer(metrics=[page]) as server:
        assert main(["doctor", "--url", f"{server.url}/v1", "--seconds", "0.1"]) == 0
        out = capsys.readouterr().out
        assert "running 8, waiting 0, KV cache 40 %" in out and "→" in out
    with TimedServer() as server:
        assert main(["doctor", "--url", server.url, "--seconds", "0.1"]) == 2
        assert "shows no metrics" in capsys.readouterr().err
    assert main(["doctor", "--url", "http://127.0.0.1:9", "--seconds", "0.1"]) == 1
    assert "No server answers at http://127.0.0.1:9" in capsys.readouterr().err
