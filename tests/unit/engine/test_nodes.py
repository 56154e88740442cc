"""An engine's ranks on two nodes, which meet at an address of this host: who is let in, how each can end."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import psutil
import pytest

from octavo.base.errors import ConfigError, EngineDead
from octavo.engine import fingerprint
from octavo.engine.executor.multiprocess import MultiprocessExecutor
from octavo.messages.kv import CachePlan
from octavo.messages.step import SchedulerOutput
from tests.node_process import node_config
from tests.process_fakes import WORKER, is_alive, wait_until
from tests.served_process import free_port

KEY = "a key of more than sixteen characters"
HOST = "127.0.0.2"


def step(step_id):
    return SchedulerOutput(step_id, [], [], ["a"], [0], [1], {0: [[1]]}, [])


class Cluster:
    """Node 0 here, others as processes."""

    def __init__(self):
        self.options = {"master_addr": HOST, "master_port": free_port(), "distributed_timeout_seconds": 30}
        self.nodes = []
        self.thread = None
        self.executor = MultiprocessExecutor(WORKER)
        self.losses = []
        self.executor.watch(self.losses.append)

    def join(self, rank=1, key=KEY, env=None, **options):
        options = json.dumps(self.options | {"node_rank": rank} | options)
        node = subprocess.Popen(
            [sys.executable, "-m", "tests.node_process", options],
            env={**os.environ, "OCTAVO_NODE_KEY": key, **(env or {})},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.nodes.append(node)
        return node

    def start(self, **options):
        return self.executor.start(node_config(**self.options | options))

    def start_in_background(self, **options):
        """Node 0 waits; what comes of it is in `outcome`."""
        self.outcome = []

        def start():
            try:
                self.outcome.append(self.start(**options))
            except Exception as error:
                self.outcome.append(error)

        self.thread = threading.Thread(target=start)
        self.thread.start()

    def close(self):
        if self.thread is not None:
            self.thread.join(25)
        self.executor.close()
        for node in self.nodes:
            with suppress(subprocess.TimeoutExpired):  # unless it waits for another engine
                node.communicate(timeout=5)
            node.kill()
            node.communicate()


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("OCTAVO_NODE_KEY", KEY)
    cluster = Cluster()
    yield cluster
    cluster.close()
    assert list(tmp_path.iterdir()) == []


def test_commands_reach_all_ranks_and_a_good_end_ends_the_node(cluster):
    node = cluster.join(tp=4)
    ready = cluster.start(tp=4)
    assert ready.available_bytes == 1000
    executor = cluster.executor
    executor.allocate(CachePlan(ready.groups, 17, 4))
    assert executor.call("plan", {}) == [17] * 4
    futures = [executor.execute(step(i)) for i in range(20)]
    assert [future.result(5).sampled_token_ids for future in futures] == [[[i]] for i in range(20)]
    answers = executor.call("whoami", {})
    assert [rank for rank, *_ in answers] == [0, 1, 2, 3]
    assert len({meeting for *_, meeting, _ in answers}) == 1
    assert answers[3][2].startswith(f"tcp://{HOST}:")
    parents = [psutil.Process(pid).ppid() for _, pid, *_ in answers]
    assert parents == [os.getpid()] * 2 + [node.pid] * 2
    executor.close()
    assert node.wait(5) == 0
    assert not any(is_alive(pid) for _, pid, *_ in answers)


def test_the_rank_that_answers_may_be_on_another_node(cluster):
    cluster.join(tp=1, pipeline_parallel_size=2)
    cluster.start(tp=1, pipeline_parallel_size=2)
    assert cluster.executor.execute(step(7)).result(5).sampled_token_ids == [[1007]]


@pytest.mark.matrix
@pytest.mark.parametrize("victim", ["node", "rank"])
def test_a_killed_node_or_rank_ends_the_engine_and_the_node_waits_for_the_next(cluster, victim):
    node = cluster.join()
    cluster.start()
    pids = [pid for _, pid, *_ in cluster.executor.call("whoami", {})]
    began = time.monotonic()
    os.kill(node.pid if victim == "node" else pids[1], signal.SIGKILL)
    assert wait_until(lambda: cluster.losses, 2)
    assert time.monotonic() - began < 1
    text = "Node 1 .* is lost" if victim == "node" else "rank 1 on node 1 ended with exit code -9"
    with pytest.raises(EngineDead, match=text):
        cluster.executor.execute(step(1)).result(1)
    cluster.executor.close()
    assert wait_until(lambda: not any(map(is_alive, pids)), 2)
    cluster.executor = MultiprocessExecutor(WORKER)
    if victim == "node":
        node.communicate()
        cluster.join()
    cluster.start()
    assert cluster.executor.execute(step(1)).result(5).step_id == 1


def test_a_lost_node_0_ends_the_ranks_of_the_other_which_joins_the_next(cluster):
    node = cluster.join(node_timeout=1.0)
    cluster.start(node_timeout=1.0)
    pids = [pid for _, pid, *_ in cluster.executor.call("whoami", {})]
    cluster.executor._lose(EngineDead("in this test"))
    cluster.executor.close()
    assert wait_until(lambda: not is_alive(pids[1]), 2)
    assert node.poll() is None
    cluster.executor = MultiprocessExecutor(WORKER)
    cluster.start()
    assert cluster.executor.call("echo", {}) == [{}, {}]


WRONG = [
    ({"tp": 4}, r"differs from node 0 in tensor_parallel_size \(4 there, 2 on node 0\)"),
    ({"orders": {"vocab_size": 9}}, r"differs from node 0 in model \(.* there, .* on node 0\)"),
    ({"rank": 2, "nnodes": 3}, r"differs from node 0 in nnodes \(3 there, 2 on node 0\)"),
    ({"key": "another key of sixteen characters"}, "does not know this node's key"),
    ({"rank": 0}, "node 0 runs the engine: start it without --headless"),
]


def test_nodes_that_do_not_fit_are_refused_and_the_right_one_is_waited_for(cluster):
    cluster.start_in_background()
    for node, (_, text) in [(cluster.join(**options), (options, text)) for options, text in WRONG]:
        _, said = node.communicate(timeout=20)
        assert node.returncode == 2
        assert re.search(text, said), said
    assert cluster.outcome == [], "nothing is disturbed"
    cluster.join()
    cluster.thread.join(20)
    assert cluster.executor.call("echo", {}) == [{}, {}]


def test_another_version_is_refused(cluster, monkeypatch):
    monkeypatch.setattr(fingerprint, "__version__", "9.9")
    cluster.start_in_background()
    _, said = cluster.join().communicate(timeout=20)
    assert "differs from node 0 in octavo (" in said
    cluster.executor._lose(EngineDead("in this test"))


@pytest.mark.slow
def test_a_rank_twice_is_refused(cluster):
    cluster.start_in_background(nnodes=3, tp=3)
    options = {"nnodes": 3, "tp": 3}
    first = cluster.join(**options)
    assert wait_until(lambda: b"belongs" in os.read(first.stderr.fileno(), 4096), 15)
    second = cluster.join(**options)
    _, said = second.communicate(timeout=20)
    assert second.returncode == 2
    assert "Node 1 is there already" in said
    first.kill()  # while node 2 is awaited: its place is free again
    first.communicate()
    cluster.join(**options)
    cluster.join(rank=2, **options)
    cluster.thread.join(20)
    assert cluster.executor.call("echo", {}) == [{}] * 3


@pytest.mark.slow
def test_a_port_in_use_and_a_node_that_does_not_come(cluster):
    with pytest.raises(ConfigError, match=r"Node 1 has not come to tcp:.* within 1 s\. Start it by"):
        cluster.start(distributed_timeout_seconds=1)
    cluster.start_in_background()
    other = MultiprocessExecutor(WORKER)
    assert wait_until(lambda: psutil.net_connections("tcp4") and cluster.thread.is_alive(), 1)
    time.sleep(0.3)
    with pytest.raises(ConfigError, match=r"cannot listen at 127\.0\.0\.2:.* in use"):
        other.start(node_config(**cluster.options))
    cluster.join()
    cluster.thread.join(20)


def test_node_1_runs_no_engine(cluster):
    with pytest.raises(ConfigError, match="This is node 1 of 2"):
        cluster.start(node_rank=1)
