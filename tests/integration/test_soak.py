"""A short run of tools/soak.py: all kinds of clients at once, and nothing of them is left.

Runs with --whole alone; tests/integration/test_overload.py and its neighbours have the parts.
"""

import asyncio
import importlib.util
from pathlib import Path

import pytest

from tests.served_process import ServeProcess

_SPEC = importlib.util.spec_from_file_location("soak", Path(__file__).parents[2] / "tools" / "soak.py")
soak = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(soak)


@pytest.mark.slow
def test_a_short_soak():
    with ServeProcess("--disable-access-log", "--max-num-seqs", "16", orders={"step_s": 0.002}) as server:
        report = asyncio.run(soak.Soak(server.port, server.process.pid).run(9, num_parts=3, min_requests=150))
        server.signal()
        assert server.end() == 0, server.log
        assert "Traceback" not in server.log
    assert not report.faults, "\n".join(report.faults[:10])
    assert report.kinds["plain", "200"] > 100 and report.kinds["left", "reset"] > 50, report.kinds
    assert {kind for kind, _ in report.kinds} == {"plain", "left", "wrong", "slow", "canary"}
    assert set(report.memory_mb) == {"front", "core", "templates"}
    for sizes in report.memory_mb.values():
        assert len(sizes) == 4 and sizes[-1] < sizes[0] + 20, report.memory_mb
