"""Sites that fail as told: which use, which owner, which action; and orders that are none."""

import time

import pytest

from octavo.base import faults
from octavo.base.errors import ConfigError


@pytest.fixture(autouse=True)
def disarm():
    yield
    faults.arm("")


def uses(site, count, owner=None):
    """Which of so many uses, counted from 1, failed."""
    failed = []
    for use in range(1, count + 1):
        try:
            faults.hit(site, owner)
        except faults.Fault:
            failed.append(use)
    return failed


def test_nothing_is_armed():
    assert uses("core.step", 3) == []


def test_the_kth_use_and_no_other():
    faults.arm("core.step:raise@3,detok:raise")
    assert uses("core.step", 5) == [3]
    assert uses("detok", 3) == [1]
    assert uses("tokenize", 3) == []


def test_an_owner_that_failed_fails_again():
    faults.arm("out.encode:raise@3")
    assert uses("out.encode", 2, "a") == []
    assert uses("out.encode", 2, "b") == [1, 2]
    assert uses("out.encode", 2, "a") == []
    assert uses("out.encode", 2, "b") == [1, 2]


def test_each_of_several_owners_uses_a_site():
    faults.arm("out.encode:raise@2")
    faults.hit_each("tokenize", "ab")
    with pytest.raises(faults.Fault):
        faults.hit_each("out.encode", "ab")
    assert uses("out.encode", 1, "b") == [1]


def test_memory_sleep_nan():
    faults.arm("core.step:memory,detok:sleep=0.05,worker.forward:nan=1")
    with pytest.raises(MemoryError):
        faults.hit("core.step")
    begun_s = time.monotonic()
    faults.hit("detok")
    assert time.monotonic() - begun_s >= 0.05
    rows = [1.0, 2.0]
    faults.hit("worker.forward", rows=rows)
    assert rows[0] == 1.0
    assert rows[1] != rows[1]


@pytest.mark.parametrize("orders", ["core.step", "core.step:explode", "core.step:raise@x", "a:sleep=long"])
def test_orders_that_are_none(orders):
    with pytest.raises(ConfigError, match="action one of raise"):
        faults.arm(orders)
