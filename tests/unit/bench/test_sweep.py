"""Sweeps: points from files, command lines, links, folders, resuming, failures, drawings."""

import csv
import json
import sys

import pytest

from octavo.base.errors import ConfigError, OctavoError
from octavo.bench.server_process import url_of
from octavo.bench.startup import StartupOptions, measure_startup
from octavo.bench.sweep import plot
from octavo.bench.sweep.experiment import Experiment, ExperimentOptions
from octavo.bench.sweep.plot import ParetoOptions, PlotOptions, pareto_front, plot_pareto, plot_sweep
from octavo.bench.sweep.serve import SweepOptions, WorkloadOptions, sweep_serve, sweep_workloads
from octavo.bench.sweep.settings import applied, name_of, read_settings

CLIENT = """
import json, sys
from pathlib import Path
words = sys.argv[1:]
values = dict(zip(words[::2], words[1::2])) if "--save-result" not in words else {}
flags = {w: words[i + 1] for i, w in enumerate(words[:-1]) if w.startswith("--") and w != "--save-result"}
if flags.get("--num-prompts") == "13":
    sys.exit("thirteen")
at_once = float(flags.get("--max-concurrency", 4))
rate = min(float(flags.get("--request-rate", "inf")), 2 + at_once)
row = {"request_throughput": rate, "mean_e2el_ms": 500.0, "output_throughput": 10 * rate,
       "total_token_throughput": 20 * rate, "median_ttft_ms": 3 * rate}
path = Path(flags["--result-dir"], flags["--result-filename"])
path.write_text(json.dumps(row))
with (path.parent.parent / "calls.txt").open("a") as log:
    log.write(" ".join(words) + "\\n")
"""
SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
if "--bad" in sys.argv:
    sys.exit("bad option")
class Handler(BaseHTTPRequestHandler):
    def answer(self):
        self.send_response(200); self.end_headers()
    do_GET = do_POST = answer
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def commands(tmp_path):
    """Options with a server and a client that take milliseconds."""
    from tests.served_process import free_port

    for name, text in (("client.py", CLIENT), ("server.py", SERVER)):
        (tmp_path / name).write_text(text)
    return {
        "serve_cmd": f"{sys.executable} {tmp_path}/server.py --port {free_port()}",
        "bench_cmd": f"{sys.executable} {tmp_path}/client.py",
    }


def points(path, content):
    path.write_text(json.dumps(content))
    return str(path)


def place(tmp_path, **options):
    return ExperimentOptions(output_dir=str(tmp_path / "results"), experiment_name="e", **options)


def test_points_and_their_names(tmp_path):
    assert read_settings("") == [{}]
    by_name = read_settings(points(tmp_path / "a.json", {"big": {"n": 4}, "small": {"n": 1}}))
    assert [name_of(point) for point in by_name] == ["big", "small"]
    assert name_of(read_settings(points(tmp_path / "b.json", [{"a": 1, "b": "x"}]))[0]) == "a=1-b=x"
    for wrong in ([1], 3, {"a": 3}, [{"_benchmark_name": "x"}, {"_benchmark_name": "x"}]):
        with pytest.raises(ConfigError):
            read_settings(points(tmp_path / "c.json", wrong))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_settings(str(tmp_path / "none.json"))


@pytest.mark.parametrize(
    ("command", "point", "result"),
    [
        ("a --n 1", {"n": 2}, "a --n 2"),
        ("a --n=1 model", {"n": 2}, "a model --n 2"),
        ("a --max_num_seqs 1 --x", {"max-num-seqs": 2}, "a --x --max-num-seqs 2"),
        ("a --flag", {"flag": False}, "a --no-flag"),
        ("a --no-flag", {"flag": True}, "a --flag"),
        ("a", {"c.d_e": True, "_benchmark_name": "z"}, "a --c.d_e=true"),
        ("a", {"j": {"k": 1}}, 'a --j {"k": 1}'),
        ("a", {"j": ["b"]}, 'a --j ["b"]'),
    ],
)
def test_a_point_replaces_options(command, point, result):
    assert " ".join(applied(command.split(), point)) == result


def test_where_a_server_is():
    assert url_of(["octavo", "serve", "--port", "81", "--host", "0.0.0.0"]) == "http://127.0.0.1:81"
    assert url_of(["vllm", "serve", "m", "--port=82"]) == "http://127.0.0.1:82"
    assert url_of(["octavo", "serve"]) == "http://127.0.0.1:8000"


def test_every_linked_combination_is_measured_once(tmp_path, commands):
    serve = points(tmp_path / "s.json", [{"max_num_seqs": 2}, {"max_num_seqs": 4}])
    client = points(tmp_path / "c.json", [{"max_concurrency": n} for n in (2, 4, 8)])
    options = SweepOptions(
        **commands, serve_params=serve, bench_params=client, link_vars="max_num_seqs=max_concurrency"
    )
    said = []
    rows = sweep_serve(place(tmp_path, num_runs=2), options, said.append)
    assert [(row["max_num_seqs"], row["max_concurrency"], row["run_number"]) for row in rows] == [
        (2, 2, 0), (2, 2, 1), (4, 4, 0), (4, 4, 1),
    ]  # fmt: skip
    folder = tmp_path / "results" / "e"
    with (folder / "summary.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 4
    base = folder / "SERVE-max_num_seqs=2-BENCH-max_concurrency=2"
    assert len(json.loads((base / "summary.json").read_text())) == 2
    with pytest.raises(ConfigError, match="Cannot overwrite"):
        sweep_serve(place(tmp_path), options, said.append)
    (base / "run=1.json").unlink()
    calls = len((folder / "calls.txt").read_text().splitlines())
    again = sweep_serve(place(tmp_path, num_runs=2, resume=True), options, said.append)
    assert again == rows
    assert len((folder / "calls.txt").read_text().splitlines()) == calls + 1


def test_what_fails_ends_the_sweep_or_is_recorded(tmp_path, commands):
    serve = points(tmp_path / "s.json", {"bad": {"bad": True}, "good": {}})
    client = points(tmp_path / "c.json", [{"num_prompts": 13}, {"num_prompts": 3}])
    options = SweepOptions(**commands, serve_params=serve, bench_params=client)
    with pytest.raises(OctavoError, match=r"exit code 1: bad option `--resume` continues"):
        sweep_serve(place(tmp_path), options, lambda text: None)
    rows = sweep_serve(
        place(tmp_path, num_runs=1, resume=True, continue_on_error=True), options, lambda text: None
    )
    assert [row["num_prompts"] for row in rows] == [3]
    failures = sorted(path.name for path in (tmp_path / "results").rglob("*failure.json"))
    assert failures == ["SERVE-bad-failure.json", "run=0.failure.json"]


def test_loads_are_found_between_one_and_all_at_once(tmp_path, commands):
    options = SweepOptions(**commands)
    found = sweep_workloads(
        place(tmp_path, num_runs=1),
        SweepOptions(**{**commands, "bench_cmd": options.bench_cmd + " --num-prompts 18"}),
        WorkloadOptions(workload_iters=4),
        lambda text: None,
    )
    # one at a time: 1 request/s (its rate is bounded), all at once: 18; two levels between these
    assert [row["request_rate"] for row in found] == [1, 7, 12, 18]
    client = points(tmp_path / "c.json", [{"request_rate": 3}])
    with pytest.raises(ConfigError, match="explored automatically"):
        sweep_workloads(
            place(tmp_path, resume=True),
            SweepOptions(**commands, bench_params=client),
            WorkloadOptions(),
            lambda text: None,
        )


def test_a_dry_run_only_tells(tmp_path, commands):
    said = []
    assert sweep_serve(place(tmp_path, dry_run=True), SweepOptions(**commands), said.append) == []
    assert any("client.py" in line for line in said)
    with pytest.raises(ConfigError, match="no such experiment"):
        Experiment(
            ExperimentOptions(output_dir=str(tmp_path), experiment_name="no", resume=True), said.append
        )


def test_drawings(tmp_path):
    base = tmp_path / "a"
    base.mkdir()
    rows = [
        {"max_concurrency": n, "tp": 1, "output_throughput": 10.0 * n, "median_ttft_ms": 5.0 * n,
         "total_token_throughput": 20.0 * n} for n in (1, 2, 4)
    ]  # fmt: skip
    (base / "summary.json").write_text(json.dumps(rows))
    [first, second] = plot_sweep(
        tmp_path, PlotOptions(fig_by="max_concurrency", filter_by="max_concurrency<4")
    )
    assert first.read_bytes().startswith(b"\x89PNG") and second.name == "FIGURE-max_concurrency=2.png"
    assert plot_pareto(tmp_path, ParetoOptions()).is_file()
    with pytest.raises(ConfigError, match="no number 'speed'"):
        plot_sweep(tmp_path, PlotOptions(var_y="speed"))
    with pytest.raises(ConfigError, match="must look like"):
        plot_sweep(tmp_path, PlotOptions(filter_by="nothing"))
    with pytest.raises(ConfigError, match="holds no results"):
        plot_sweep(tmp_path / "none", PlotOptions())


def test_a_grid_of_drawings(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(plot, "plot_grid", lambda grid, style, path: drawn.update({path.name: (grid, style)}))
    rows = [
        {"tp": tp, "dtype": dtype, "run": run, "x": 10.0 * run + tp, "y": y}
        for dtype in ("bf16", "int8") for tp in (1, 2, 10) for run, y in enumerate((5.0, 7.0))
    ]  # fmt: skip
    (tmp_path / "summary.json").write_text(json.dumps(rows))
    options = {"row_by": "dtype", "col_by": "tp", "var_x": "x", "var_y": "y", "bin_by": "x%20"}
    plot_sweep(tmp_path, PlotOptions(**options, fig_by="run"))
    assert list(drawn) == ["FIGURE-run=0.png", "FIGURE-run=1.png"]
    plot_sweep(tmp_path, PlotOptions(**options, scale_x="log", fig_name="F"))
    grid, style = drawn["F.png"]
    assert list(grid) == [(f"dtype={d}", f"tp={n}") for d in ("bf16", "int8") for n in (1, 2, 10)]
    assert grid["dtype=bf16", "tp=1"] == {"": [(0.0, 6.0, pytest.approx(2**0.5))]}
    assert style.scales == ("log", "linear") and style.height == 6.4 and style.dpi == 300
    plot_sweep(
        tmp_path, PlotOptions(**options, filter_by="dtype==bf16,tp!=1.0,y>5", error_bars=False, fig_name="F")
    )
    assert drawn["F.png"][0] == {("dtype=bf16", f"tp={n}"): {"": [(n // 10 * 20, 7.0, 0.0)]} for n in (2, 10)}
    drawn.clear()
    assert (
        plot_sweep(tmp_path, PlotOptions(**options, fig_by="tp", dry_run=True))[2].name == "FIGURE-tp=10.png"
    )
    assert not drawn
    for wrong, text in (
        ({"bin_by": "x%0"}, "positive size"),
        ({"bin_by": "x"}, "must look like"),
        ({"row_by": "z"}, "no field 'z'"),
        ({"filter_by": "x<a"}, "'a' is no number"),
        ({"filter_by": "x>99"}, "No result fulfils"),
        ({"fig_dpi": 0}, "positive"),
    ):
        with pytest.raises(ConfigError, match=text):
            plot_sweep(tmp_path, PlotOptions(**options | wrong))


def test_pareto_points_per_user_and_device(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        plot, "plot_trade_off", lambda points, front, labels, path: drawn.append((points, front, path))
    )
    rows = [
        {"max_concurrency": 2, "tensor-parallel-size": 2, "output_throughput": 40},
        {"max_concurrency": None, "request_rate": 4, "output_throughput": 20},
        {"request_rate": "inf", "max_concurrent_requests": 10, "output_throughput": 10},
        {"request_rate": "inf", "output_throughput": 10},
    ]
    (tmp_path / "summary.json").write_text(json.dumps(rows))
    plot_pareto(tmp_path, ParetoOptions(label_by="gpu_count"))
    [(points, front, path)] = drawn
    assert points == [(20, 20, "gpu_count=2"), (5, 20, "gpu_count=1"), (1, 10, "gpu_count=1")]
    assert front == points[:1] and path == tmp_path / "pareto" / "PARETO.png"
    with pytest.raises(ConfigError, match="how many users"):
        (tmp_path / "summary.json").write_text(json.dumps(rows[3:]))
        plot_pareto(tmp_path, ParetoOptions())


def test_the_pareto_front_has_what_nothing_beats():
    assert pareto_front([(1, 9), (2, 5), (3, 7), (4, 1), (2, 8)]) == [(1, 9), (2, 8), (3, 7), (4, 1)]


def test_cold_starts_have_an_empty_cache_and_warm_ones_a_warm_up():
    seen = []

    def start(engine, environment):
        seen.append((dict(engine), dict(environment)))
        return float(len(seen))

    options = StartupOptions(num_iters_cold=2, num_iters_warmup=1, num_iters_warm=2)
    result = measure_startup({"model": "m"}, options, start)
    assert [list(environment) for _, environment in seen] == [["OCTAVO_CACHE_DIR"]] * 2 + [[]] * 3
    assert len({str(environment) for _, environment in seen}) == 3  # each cold one its own folder
    assert result["cold_startup_times"] == [1, 2] and result["warm_startup_times"] == [4, 5]
    assert result["avg_warm_startup_time"] == 4.5 and set(result["warm_startup_percentiles"]) == {
        "10", "25", "50", "75", "90", "99",
    }  # fmt: skip
