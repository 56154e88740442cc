"""/metrics of a server with several front processes: whichever answers shows all, also after one has died.

Runs with --whole alone; tests/integration/test_serve_process.py has two fronts that count together.
"""

import re
import time

import httpx
import pytest

from tests.served_process import ServeProcess

_PROMPT = {"model": "fake", "prompt": "hello", "max_tokens": 5, "ignore_eos": True}


def metric(server, name):
    page = server.get("/metrics").text  # a connection of its own: any front may answer
    return sum(map(float, re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", page, re.MULTILINE)))


@pytest.mark.slow
def test_every_front_shows_the_sum_and_it_never_falls():
    with ServeProcess("--api-server-count", "3", "--disable-access-log") as server:
        num_answered = last = 0
        for turn in range(45):
            if turn == 20:
                time.sleep(1.5)  # all have published
                fronts = [
                    child for child in server.children() if "octavo.engine.process" not in child.cmdline()
                ]
                assert len(fronts) == 2
                fronts[0].kill()
            try:
                num_answered += server.post("/v1/completions", _PROMPT).status_code == 200
                shown = metric(server, "vllm:generation_tokens_total")
            except httpx.TransportError:
                assert turn >= 20
                continue
            assert shown >= last
            last = shown
        assert num_answered >= 40
        time.sleep(1.0)
        assert {metric(server, "vllm:generation_tokens_total") for _ in range(12)} == {5.0 * num_answered}
        assert {metric(server, "http_requests_total") for _ in range(12)} == {num_answered}
        queries = {metric(server, "vllm:prefix_cache_queries_total") for _ in range(12)}
        assert len(queries) == 1, "what the core tells all fronts counts once"
        assert queries.pop() <= 6 * num_answered
