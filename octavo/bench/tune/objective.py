"""`ServerObjective`: starts `octavo serve` with a point's options, puts the workload on it, scores it."""

import asyncio
import math
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from octavo.base.cores import usable_cores
from octavo.base.errors import OctavoError
from octavo.base.link import free_port
from octavo.bench.backends import BACKENDS
from octavo.bench.client import Target
from octavo.bench.diagnosis import Diagnosis, diagnose, idle_core_s
from octavo.bench.serve import ServeBench, measure
from octavo.bench.server_metrics import Page, read_page
from octavo.bench.server_process import ServerProcess
from octavo.bench.sweep.settings import applied
from octavo.bench.tune.search import Trial
from octavo.bench.tune.space import Options

SCORES = {"throughput": "output_throughput", "goodput": "request_goodput"}
"""Fields of a benchmark's result, by what is wanted."""
_EVERY_S = 0.5
_TOLD = (
    *("output_throughput", "request_throughput", "request_goodput", "median_ttft_ms", "p99_ttft_ms"),
    *("median_tpot_ms", "median_itl_ms", "p99_itl_ms"),
)
_PATIENCE = 3.0
"""How many times as long as the best point another may take."""


@dataclass
class ServerObjective:
    """Measures points for the search."""

    model: str
    fixed: Mapping[str, Any]
    """Options of every server."""
    bench: ServeBench
    score: str
    """Field of the benchmark's result that is made large, one of SCORES."""
    longest_s: float = math.inf
    """A measurement that takes longer is given up."""

    def __call__(self, options: Options) -> Trial:
        """Return the trial of a point; what goes wrong is told in it."""
        start = time.monotonic()
        try:
            with tempfile.TemporaryDirectory(prefix="octavo-tune-") as folder:
                command = self.command(options, free_port("127.0.0.1"))
                with ServerProcess(command, Path(folder, "server.log")) as server:
                    result, diagnosis = asyncio.run(self._measure(server.url))
        except OctavoError as error:
            return Trial(options, None, time.monotonic() - start, error=str(error))
        score = float(result[self.score])
        figures = {name: float(result[name]) for name in _TOLD if result.get(name) is not None}
        self.longest_s = min(self.longest_s, _PATIENCE * result["duration"] + 10)
        seconds = time.monotonic() - start
        return Trial(options, score, seconds, figures, diagnosis.bound, diagnosis.lines())

    def command(self, options: Options, port: int) -> list[str]:
        """Return the command line of a point's server."""
        base = [sys.executable, "-m", "octavo", "serve", self.model, "--host", "127.0.0.1"]
        base += ["--port", str(port), "--disable-access-log"]
        return applied(base, {**self.fixed, **options})

    async def _measure(self, url: str) -> tuple[dict[str, Any], Diagnosis]:
        bench = replace(self.bench, load=replace(self.bench.load, base_url=url, disable_tqdm=True))
        pages: list[tuple[float, Page]] = []
        async with Target(url, BACKENDS[bench.load.backend]) as target:
            watcher = asyncio.create_task(_watch(target, pages))
            start, idle_s = time.monotonic(), idle_core_s()
            try:
                result = await asyncio.wait_for(measure(bench), self.longest_s)
            except TimeoutError:
                raise OctavoError(
                    f"given up after {self.longest_s:.0f} s: much slower than the best"
                ) from None
            finally:
                watcher.cancel()
            pages.append((time.monotonic(), await read_page(target)))
            idle_cores = (idle_core_s() - idle_s) / (time.monotonic() - start)
        return result, _diagnose(pages, min(idle_cores, usable_cores()))


async def _watch(target: Target, pages: list[tuple[float, Page]]) -> None:
    while True:
        pages.append((time.monotonic(), await read_page(target)))
        await asyncio.sleep(_EVERY_S)


def _diagnose(pages: list[tuple[float, Page]], idle_cores: float) -> Diagnosis:
    """Judge the time with requests: from the page before the first to the one behind the last."""
    busy = [place for place, (_, page) in enumerate(pages) if page.get("num_requests_running")]
    first, last = (max(0, busy[0] - 1), min(len(pages) - 1, busy[-1] + 1)) if busy else (0, len(pages) - 1)
    seconds = max(pages[last][0] - pages[first][0], 1e-3)
    return diagnose([page for _, page in pages[first : last + 1]], seconds, idle_cores)
