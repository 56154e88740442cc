"""Which steps a profile shows: those that the keywords of start name."""

import json
from pathlib import Path

import pytest
import torch

from octavo.base.errors import RequestError
from octavo.runtime.worker.profiler import Profiler


@pytest.mark.parametrize(
    ("counts", "recorded"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ((2, 0), [2, 3, 4]),
        ((0, 2), [0, 1]),
        ((1, 3), [1, 2, 3]),
        ((1, 9), [1, 2, 3, 4]),
    ],
)
def test_steps_of_a_profile(counts, recorded, tmp_path):
    profiler = Profiler(str(tmp_path), 0)
    profiler.start("mine", **dict(zip(("delay_iterations", "max_iterations"), counts, strict=False)))
    for number in range(5):
        profiler.before_step()
        with torch.profiler.record_function(f"step {number}"):
            torch.ones(1)
    with pytest.raises(RequestError, match="recorded already"):
        profiler.start()
    events = json.loads(Path(profiler.stop()).read_text())["traceEvents"]
    shown = sorted({event["name"] for event in events if event["name"].startswith("step ")})
    assert shown == [f"step {number}" for number in recorded]


def test_a_profile_that_ends_before_its_first_step_has_no_trace(tmp_path):
    profiler = Profiler(str(tmp_path), 0)
    profiler.start(delay_iterations=3)
    profiler.before_step()
    assert profiler.stop() == ""
    assert not profiler.is_on and list(tmp_path.iterdir()) == []
