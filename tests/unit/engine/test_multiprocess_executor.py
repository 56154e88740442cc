"""Ranks in processes of their own: order, every rank's answers, and every way in which a rank can fail."""

import os
import signal
import time

import pytest

from octavo.base.errors import ConfigError, EngineDead, OctavoError, RequestError, Unsupported
from octavo.engine.executor import multiprocess
from octavo.engine.executor.inproc import InprocExecutor
from octavo.engine.executor.multiprocess import MultiprocessExecutor
from octavo.messages.kv import CachePlan
from octavo.messages.step import SchedulerOutput, TokenMasks
from tests.process_fakes import WORKER, is_alive, process_config, wait_until


def step(step_id, masks_follow=False):
    return SchedulerOutput(step_id, [], [], ["a"], [0], [1], {0: [[1]]}, [], masks_follow=masks_follow)


@pytest.fixture(autouse=True)
def tmpdir_of_its_own(tmp_path, monkeypatch):
    """Nothing may be left there."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def start():
    executors = []

    def start(kind=MultiprocessExecutor, tp=2, **orders):
        executor = kind(WORKER)
        executors.append(executor)
        return executor, executor.start(process_config("mp", tp=tp, **orders))

    yield start
    for executor in executors:
        executor.close()
        executor.close()


def test_close_before_start():
    MultiprocessExecutor(WORKER).close()
    InprocExecutor(WORKER).close()


@pytest.mark.parametrize(
    ("kind", "tp"), [(InprocExecutor, 1), (MultiprocessExecutor, 1), (MultiprocessExecutor, 3)]
)
def test_conformance(start, kind, tp):
    executor, ready = start(kind, tp)
    assert ready.available_bytes == 1000, "the rank with the least memory counts"
    executor.allocate(CachePlan(ready.groups, 17, 4))
    assert executor.call("plan", {}) == [17] * tp
    futures = [executor.execute(step(i)) for i in range(20)]
    assert [future.result(5).sampled_token_ids for future in futures] == [[[i]] for i in range(20)]
    late = executor.execute(step(20, masks_follow=True))
    executor.sample(TokenMasks([0], [0], b"\xff" * 4))
    futures = [executor.execute(step(21)), executor.execute(step(22, masks_follow=True))]
    executor.sample(TokenMasks([], [], b""))
    assert [future.result(5).step_id for future in (late, *futures)] == [20, 21, 22]
    assert executor.call("masks", {}) == [[[0], []]] * tp
    arguments = {"text": "é", "list": [1, 2.5, None], "bytes": b"\0"}
    assert executor.call("echo", arguments) == [arguments] * tp


def test_ranks_are_processes_with_one_rendezvous(start, tmp_path):
    executor, _ = start(tp=2)
    (rank0, pid0, url0, interface), (rank1, pid1, url1, _) = executor.call("whoami", {})
    assert [rank0, rank1] == [0, 1]
    assert len({os.getpid(), pid0, pid1}) == 3
    assert url0 == url1
    assert url0.startswith(f"file://{tmp_path}/octavo-")
    assert interface == "lo"
    executor.close()
    assert not is_alive(pid0)
    assert not is_alive(pid1)


@pytest.mark.parametrize(("verb", "text"), [("nonsense", "no verb nonsense"), ("unsendable", "object")])
def test_a_refused_call_harms_nothing(start, verb, text):
    executor, _ = start()
    with pytest.raises(OctavoError, match=text):
        executor.call(verb, {})
    assert executor.execute(step(1)).result(5).step_id == 1
    assert executor.call("echo", {}) == [{}, {}]


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [("own", RequestError, "no"), ("other", Unsupported, "no"), ("bug", OctavoError, "KeyError: 'no'")],
)
def test_ranks_refuse_as_one_would(start, kind, error, text):
    executor, _ = start()
    with pytest.raises(OctavoError) as all_of_them:
        executor.call("refuse", {"ranks": [0, 1], "kind": kind})
    with pytest.raises(OctavoError) as one:
        executor.call("refuse", {"ranks": [1], "kind": kind})
    assert (type(all_of_them.value), str(all_of_them.value)) == (error, text)
    assert (type(one.value), str(one.value)) == (error, f"rank 1: {text}")
    with pytest.raises(error, match=text):
        executor.call("sleep", {"ranks": [0, 1], "kind": kind})
    assert executor.execute(step(1)).result(5).step_id == 1


def test_ranks_that_differ_are_of_no_use(start):
    executor, _ = start()
    with pytest.raises(EngineDead, match="Ranks differ after sleep: rank 1: no"):
        executor.call("sleep", {"ranks": [1], "kind": "own"})
    with pytest.raises(EngineDead, match="Ranks differ"):
        executor.execute(step(1)).result(5)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("fault", "error", "text"),
    [
        ("load:raise", EngineDead, "rank 1: RuntimeError: the fake was told to fail"),
        ("load:config", ConfigError, "^the option is wrong$"),
        ("load:exit", EngineDead, "rank 1 ended with exit code 3"),
    ],
)
def test_start_fails(start, fault, error, text):
    with pytest.raises(error, match=text):
        start(fault=fault, fault_rank=1)


@pytest.mark.matrix
@pytest.mark.parametrize("fault_rank", [0, 1])
@pytest.mark.parametrize(
    ("action", "text"), [("raise", "RuntimeError: the fake was told"), ("exit", "ended with exit code 3")]
)
def test_a_failing_rank_ends_everything(start, action, text, fault_rank):
    executor, _ = start(fault=f"2:{action}", fault_rank=fault_rank)
    pids = [answer[1] for answer in executor.call("whoami", {})]
    assert executor.execute(step(1)).result(5).step_id == 1
    futures = [executor.execute(step(i)) for i in range(2, 6)]
    assert wait_until(lambda: executor.execute(step(9)).exception(5) is not None, timeout_s=1)
    for future in futures:  # if rank 1 is the one that failed, rank 0 may have answered first
        error = future.exception(1)
        assert isinstance(error, EngineDead) or (fault_rank == 1 and error is None)
    with pytest.raises(EngineDead, match=f"rank {fault_rank}.*{text}"):
        executor.execute(step(10)).result(1)
    with pytest.raises(EngineDead, match=text):
        executor.call("echo", {})
    executor.close()
    assert not any(map(is_alive, pids))


def test_a_killed_rank_is_noticed_within_a_second_while_the_other_hangs(start):
    executor, _ = start(fault="1:hang", fault_rank=0)
    pids = [answer[1] for answer in executor.call("whoami", {})]
    future = executor.execute(step(1))
    os.kill(pids[1], 9)
    with pytest.raises(EngineDead, match="rank 1 ended with exit code -9"):
        future.result(1)
    began = time.monotonic()
    executor.close()
    assert time.monotonic() - began < 2, "a rank that hangs is killed"
    assert not any(map(is_alive, pids))


def test_inproc_error_is_the_futures():
    executor = InprocExecutor(WORKER)
    executor.start(process_config(fault="1:raise"))
    assert executor.execute(step(0)).result().step_id == 0
    assert isinstance(executor.execute(step(1)).exception(), RuntimeError)
    executor.close()


def test_a_rank_that_is_stopped_while_idle_is_found(start, monkeypatch):
    monkeypatch.setattr(multiprocess, "_BEAT_S", 0.05)
    monkeypatch.setattr(multiprocess, "_SILENCE_S", 1.0)
    losses = []
    executor = MultiprocessExecutor(WORKER)
    executor.watch(losses.append)
    executor.start(process_config("mp", tp=3))
    try:
        pids = [answer[1] for answer in executor.call("whoami", {})]
        for _ in range(30):
            executor.beat()
            time.sleep(0.05)
        assert not losses, "all answer"
        os.kill(pids[1], signal.SIGSTOP)
        assert wait_until(lambda: executor.beat() or losses, timeout_s=5)
        assert "Rank 1 has not answered for 1 s" in str(losses[0])
        with pytest.raises(EngineDead, match="Rank 1"):
            executor.execute(step(1)).result(1)
    finally:
        executor.close()
    assert not any(map(is_alive, pids))
