"""Which models give way: by groups, by memory, by number; and which are refused before any does."""

import dataclasses

import pytest

from octavo.base.errors import ConfigError
from octavo.config.served_models import ServedModels
from octavo.serving.model_pool.footprint import Footprint
from octavo.serving.model_pool.residency import Limits, Resident, departures, surplus

GIB = 1 << 30


def footprint(awake, asleep=1, **gpu):
    return Footprint(awake * GIB, asleep * GIB, **{name: size * GIB for name, size in gpu.items()})


def limits(host=10, gpu=0, max_loaded=9, groups=()):
    served = ServedModels(entries=(), groups=tuple(map(frozenset, groups)), max_loaded=max_loaded)
    return Limits(served, host * GIB, gpu * GIB)


def resident(name, awake=4, asleep=1, used=0.0, **state):
    return Resident(name, footprint(awake, asleep), last_used_s=used, **state)


NEW = resident("new")


def test_nobody_gives_way_where_there_is_room():
    assert departures(NEW, [resident("a")], limits()) == {}


def test_the_least_recently_used_sleeps_first():
    others = [resident("b", used=2), resident("a", used=1), resident("c", used=3)]
    assert departures(NEW, others, limits(host=14)) == {"a": "sleep"}
    assert departures(NEW, others, limits(host=12)) == {"a": "sleep", "b": "sleep"}


def test_a_busy_one_is_the_last():
    others = [resident("a", used=1, is_busy=True), resident("b", used=2)]
    assert departures(NEW, others, limits(host=9)) == {"b": "sleep"}


def test_sleepers_go_where_sleep_is_not_enough():
    others = [resident("a", asleep=3, used=2), resident("b", asleep=3, used=1, is_awake=False)]
    assert departures(NEW, others, limits(host=8)) == {"a": "sleep", "b": "unload"}
    assert departures(NEW, others, limits(host=5)) == {"a": "unload", "b": "unload"}


def test_one_that_is_asleep_need_not_go_where_another_can_sleep():
    others = [resident("a", used=2), resident("b", used=1, is_awake=False)]
    assert departures(NEW, others, limits(host=6)) == {"a": "sleep"}


def test_groups_say_who_may_stay():
    groups = limits(groups=[("new", "a"), ("b", "c")])
    assert departures(NEW, [resident("a")], groups) == {}
    assert departures(NEW, [resident("b", 1), resident("c", 1)], groups) == {"b": "sleep", "c": "sleep"}
    assert departures(resident("lonely"), [resident("a")], groups) == {"a": "sleep"}


def test_what_is_too_big_drives_nobody_out():
    with pytest.raises(ConfigError, match=r"needs 11 GiB of host memory.*may take 10 GiB"):
        departures(resident("new", 11), [resident("a")], limits())


def test_what_is_fixed_is_not_moved():
    fixed = resident("a", is_fixed=True)
    assert departures(NEW, [fixed, resident("b", used=1)], limits(host=9)) == {"b": "sleep"}
    assert departures(NEW, [fixed], limits(host=7)) is None
    assert departures(NEW, [fixed], limits(groups=[("new",), ("a",)])) is None
    assert departures(NEW, [fixed, resident("b", asleep=3, is_awake=False)], limits(host=8)) == {
        "b": "unload"
    }


def test_gpus_count_apart():
    new = dataclasses.replace(NEW, footprint=footprint(1, 1, gpu_awake=7, gpu_asleep=1))
    other = dataclasses.replace(new, name="a")
    assert departures(new, [other], limits(gpu=8)) == {"a": "sleep"}
    assert departures(new, [other], limits(gpu=14)) == {}
    assert departures(new, [other], limits(gpu=7)) == {"a": "unload"}
    with pytest.raises(ConfigError, match="7 GiB of each GPU"):
        departures(new, [], limits(gpu=6))


def test_of_too_many_the_sleeping_and_least_recently_used_go():
    others = [NEW, resident("a", used=1), resident("b", used=3, is_awake=False), resident("c", used=2)]
    assert surplus("new", others, limits(max_loaded=4)) == []
    assert surplus("new", others, limits(max_loaded=3)) == ["b"]
    assert surplus("new", others, limits(max_loaded=2)) == ["b", "a"]
    assert surplus("new", others, limits(max_loaded=1)) == ["b", "a", "c"]
