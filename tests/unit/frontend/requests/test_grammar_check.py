"""Verdicts on grammars, by real checker processes over the byte tokenizer."""

import os
import signal
import threading
import time

import psutil
import pytest

from octavo.base.errors import Overloaded, RequestError
from octavo.frontend.requests import grammar_check
from octavo.frontend.requests.check_queue import CheckQueue, Job
from octavo.frontend.requests.grammar_check import GrammarCheck
from octavo.messages.structured import StructuredOutputsParams
from tests.fakes import ByteTokenizer
from tests.structured import EOS, VOCAB_SIZE

HOSTILE = {
    "deep regex": {"regex": "(" * 30_000 + "a" + ")" * 30_000},
    "deep grammar": {"grammar": "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000},
    "left recursion": {"grammar": "root ::= root root | root root root | root"},
    "circle of references": {
        "json": {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}
    },
    "many properties": {"json": {"properties": {f"p{i}": {"type": "string"} for i in range(20_000)}}},
    "product of choices": {
        "json": {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(9)]} for i in range(9)]}
    },
}


@pytest.fixture(scope="module")
def check():
    check = GrammarCheck(ByteTokenizer(), VOCAB_SIZE, [EOS])
    yield check
    check.close()


def params(**values):
    return StructuredOutputsParams(**values)


def checkers():
    return [
        child
        for child in psutil.Process().children()
        if child.status() != psutil.STATUS_ZOMBIE and "octavo.engine.structured.checker" in child.cmdline()
    ]


def test_a_good_grammar_becomes_a_constraint(check):
    constraint = check.check(params(choice=["yes", "no"]))
    assert '"yes" | "no"' in constraint.grammar
    assert check.check(params(choice=["yes", "no"])) == constraint


def test_a_bad_grammar_is_refused(check):
    with pytest.raises(RequestError, match="unclosed") as caught:
        check.check(params(regex="(["))
    assert caught.value.parameter == "structured_outputs"


def computed_s():
    """Of all checkers, also of those that have ended."""
    ended = psutil.Process().cpu_times()
    living = [checker.cpu_times() for checker in checkers()]
    return ended.children_user + ended.children_system + sum(each.user + each.system for each in living)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_bounded(check, monkeypatch, name):
    monkeypatch.setattr(grammar_check, "TIME_LIMIT_S", 1.5)
    hostile = params(**HOSTILE[name])
    start_s = computed_s()
    with pytest.raises(RequestError, match=r"too complex|Grammar error|too large"):
        check.check(hostile)
    assert computed_s() - start_s < 4
    start = time.monotonic()
    with pytest.raises(RequestError):
        check.check(hostile)  # remembered
    assert time.monotonic() - start < 0.3
    monkeypatch.undo()
    assert check.check(params(choice=[name]))


def test_what_takes_too_long_is_killed(check, monkeypatch):
    check.check(params(choice=["warm"]))
    monkeypatch.setattr(grammar_check, "TIME_LIMIT_S", 0.01)
    before = checkers()
    with pytest.raises(RequestError, match="too complex"):
        check.check(params(json={"enum": [f"v{i * 7919}" for i in range(75_000)]}))
    assert len(checkers()) == len(before) - 1
    monkeypatch.undo()
    assert check.check(params(choice=["next"]))


def test_a_checker_that_gets_no_time_is_waited_for(check, monkeypatch):
    """As on a busy machine: a good grammar is good, though the answer comes after the limit."""
    check.check(params(choice=["warm"]))
    monkeypatch.setattr(grammar_check, "TIME_LIMIT_S", 0.5)
    for process in checkers():
        process.suspend()
    try:
        future = check.ask(params(choice=["late"]))
        time.sleep(0.8)
    finally:
        for process in checkers():
            process.resume()
    assert future.result().error == ""


def test_others_do_not_wait_for_a_hostile_grammar(check):
    for future in [check.ask(params(choice=[word])) for word in ("warm", "both")]:
        future.result()
    huge = check.ask(params(json={"enum": [i * 7919 for i in range(80_000)]}))
    check.check(params(choice=["quick"]))
    assert not huge.done()
    huge.result()


@pytest.mark.slow
def test_good_grammars_do_not_wait_for_many_hostile_ones(check, monkeypatch):
    """Small ones of the same tenant pass all large ones; a large one of another tenant waits its turn."""
    check._idle += [check._take_checker(ByteTokenizer()) for _ in range(3 - len(check._idle))]
    monkeypatch.setattr(grammar_check, "TIME_LIMIT_S", 1.5)
    hostile = [check.ask(params(choice=[f"{n}-{i}" for i in range(90_000)]), "bad") for n in range(6)]
    start = time.monotonic()
    check.check(params(regex="[a-f]{7}"))
    assert time.monotonic() - start < 1.0
    check.ask(params(choice=[f"good {i}" for i in range(6000)]), "good").result()
    assert sum(future.done() for future in hostile) <= 4
    for future in hostile:
        assert "too complex" in future.result().error


def test_a_tenant_that_has_too_much_waiting_is_told_so():
    queue = CheckQueue()
    jobs = [Job(params(choice=[str(n)]), size) for n, size in enumerate((9 << 20, 10, 100_000, 20, 200_000))]
    queue.put("a", jobs[0])
    with pytest.raises(Overloaded, match="wait to be checked"):
        queue.put("a", jobs[1])
    queue.put("b", jobs[2])
    queue.put("b", jobs[3])
    queue.put("c", jobs[4])
    assert queue.take(allows_large=False) is jobs[3]
    assert [queue.take(allows_large=True) for _ in range(4)] == [jobs[0], jobs[4], jobs[2], None]
    queue.put("a", jobs[1])
    queue.close()
    assert jobs[1].future.cancelled()


def test_a_killed_checker_costs_one_request(check, monkeypatch):
    check.check(params(choice=["warm"]))
    checker = check._idle[-1]
    pids = [child.pid for child in checkers()]
    judge = checker.judge

    def stop_and_judge(asked):
        for pid in pids:
            threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
            os.kill(pid, signal.SIGSTOP)
        return judge(asked)

    monkeypatch.setattr(checker, "judge", stop_and_judge)
    with pytest.raises(RequestError, match="too complex"):
        check.check(params(choice=["unlucky"]))
    assert check.check(params(choice=["lucky"]))


def test_a_checker_that_died_idle_is_replaced(check):
    check.check(params(choice=["warm"]))
    for child in checkers():
        child.kill()
        child.wait(5)
    deadline = time.monotonic() + 5
    while any(checker.is_alive for checker in check._idle) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert check.check(params(choice=["after"]))


def test_those_who_ask_the_same_share_one_answer(check):
    same = [check.ask(params(regex="[a-z]{3}")) for _ in range(5)]
    assert len({id(future.result()) for future in same}) == 1


def test_values_that_no_message_holds(check):
    with pytest.raises(RequestError, match="64 bits"):
        check.check(params(json={"maximum": 10**30}))


def test_without_a_tokenizer():
    with pytest.raises(RequestError, match="requires a tokenizer so it can't be used"):
        GrammarCheck(None, VOCAB_SIZE, [EOS]).check(params(regex="a"))


def test_nothing_is_left(check):
    own = GrammarCheck(ByteTokenizer(), VOCAB_SIZE, [EOS])
    before = len(checkers())
    path = own.check(params(choice=["a"])).vocabulary
    assert len(checkers()) == before + 1 and os.path.exists(path)  # noqa: PTH110
    own.close()
    own.close()
    assert len(checkers()) == before
    assert not os.path.exists(path)  # noqa: PTH110
