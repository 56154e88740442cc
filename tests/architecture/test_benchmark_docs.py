"""docs/benchmarks.md says what the records say: tables and plot are made from them, and records are shown."""

import json
import re

import pytest

from benchmarks import tables
from benchmarks.plot import curves, picture, svg

RESULTS = tables.RECORD.parent


def test_tables_are_what_the_records_say():
    written = tables.PAGE.read_text(encoding="utf-8")
    assert written == tables.page(written), "run python benchmarks/tables.py"
    assert len(tables.BLOCK.findall(written)) >= 2


def test_the_plot_is_what_the_record_says():
    assert tables.plot() == (tables.PLOT.read_text(encoding="utf-8") if tables.PLOT.exists() else "")


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_a_record_says_what_it_depends_on(path):
    record = json.loads(path.read_text(encoding="utf-8"))
    assert {"date", "machine", "versions", "commit", "command", "note"} <= record.keys()


def test_every_record_that_the_page_names_exists():
    named = set(re.findall(r"`([\w-]+)\.json`", tables.PAGE.read_text(encoding="utf-8")))
    assert named <= {path.stem for path in RESULTS.glob("*.json")}


def test_a_table_changes_with_its_record(monkeypatch):
    row = {"engine": "one", "workload": "W2", "values": [12.34, 150.6]}
    start = {"engine": "one", "workload": "start", "values": [3.0, 1.0, 2.5, 9.0, 2.0]}
    same = {"engine": "one", "requests": 9, "same_first_8_tokens": 7}
    machine = {"cpu": "C", "features": ["avx2"], "cores": 2}
    record = {
        "machine": machine,
        "commit": "c",
        "date": "2026-11-21T",
        "note": "quiet",
        "rows": [row, start, same],
    }
    monkeypatch.setattr(tables, "_read", lambda _: record)
    filled = tables.page("before\n<!-- peers a -->\nold\n<!-- end -->\nafter")
    assert "| engine | W2 ms/token | start to first token, s | first 8 tokens as above |\n" in filled
    assert "| one | 12.3, 151 | 2.5 (1 to 9) | 7 of 9 |\n" in filled
    assert "old" not in filled
    assert "`a.json`: C (avx2), 2 cores; commit c, 2026-11-21. quiet" in filled


def test_a_plot_has_a_line_per_engine_with_more_streams_further_right_and_more_tokens_higher():
    rows = [
        {"engine": name, "workload": f"S{streams}", "median": streams * factor}
        for name, factor in (("slow & old", 10.0), ("new", 20.0))
        for streams in (1, 4, 16)
    ]
    lines = curves([*rows, {"engine": "new", "workload": "W2", "median": 1.0}])
    [axes] = picture(lines).axes
    drawn = [axes.transData.transform(line.get_xydata()) for line in axes.lines]
    assert len(drawn) == 2
    for xs, ys in (points.T for points in drawn):
        assert list(xs) == sorted(xs)
        assert list(ys) == sorted(ys)
        assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.2)  # equal factors, equal distances
    slow, new = (points[-1][1] for points in drawn)
    assert new > slow
    assert "slow &amp; old" in svg(lines)
    assert svg(lines) == svg(lines)
