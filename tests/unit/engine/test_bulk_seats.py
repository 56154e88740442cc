"""Requests in bulk leave half of the seats to others when these come, and tenants in bulk take turns."""

from collections import Counter

from octavo.engine.scheduler.scheduler import MAX_EXAMINED
from octavo.messages.step import ModelRunnerOutput
from tests.unit.engine.test_scheduling_policies import World


def running(world):
    return Counter(r.standing.tenant for r in world.tracker.running if r.standing.in_bulk)


def test_whoever_waits_for_an_answer_finds_a_seat_behind_a_thousand():
    world = World("fcfs")
    for index in range(1024):
        world.add(f"bulk{index}", max_tokens=20, in_bulk=True)
    for _ in range(5):
        world.step()
    assert running(world).total() == 8, "nobody else is there"
    world.add("asked", max_tokens=3)
    parts = world.step()
    assert "asked" in parts, "it starts in the next step"
    assert running(world).total() == 7, "one gave way"
    for index in range(9):
        world.add(f"asked{index}", max_tokens=50)
    world.step()
    assert len(world.tracker.running) == 8 and running(world).total() == 4


def test_one_that_a_step_in_flight_has_pauses_before_it_gives_way():
    world = World("fcfs")
    for index in range(20):
        world.add(f"bulk{index}", max_tokens=20, in_bulk=True)
    world.step()
    ahead = world.scheduler.schedule()
    world.add("asked", max_tokens=3)
    behind = world.scheduler.schedule()
    assert len(ahead.request_ids) == 8 and behind.request_ids == [f"bulk{index}" for index in range(7)]
    for step in (ahead, behind):
        world.scheduler.update(ModelRunnerOutput(step.step_id, [[5]] * len(step.request_ids)))
    assert "asked" in world.step() and running(world).total() == 7


def test_the_half_holds_while_others_are_open_and_where_blocks_are_few():
    world = World("fcfs")
    world.add("asked", max_tokens=6)
    for index in range(20):
        world.add(f"bulk{index}", max_tokens=30, in_bulk=True)
    most = 0
    while "asked" not in world.ended:
        world.step()
        most = max(most, running(world).total())
    assert most == 4
    world.step()
    assert running(world).total() == 8
    narrow = World("fcfs", num_blocks=25)
    for index in range(20):
        narrow.add(f"bulk{index}", max_tokens=4, in_bulk=True)
    narrow.step()
    assert running(narrow).total() == 7, "none beyond four starts when half of the 24 blocks are taken"


def test_others_may_have_every_seat_and_come_first_but_not_for_ever():
    world = World("fcfs")
    for index in range(12):
        world.add(f"asked{index}", max_tokens=6)
    world.add("bulk", in_bulk=True)
    world.step()
    assert len(world.tracker.running) == 8 and not running(world)
    for index in range(300):
        world.add(f"late{index}", max_tokens=6)
    while "bulk" not in world.ended:
        world.step()
    assert 48 <= sum(name.startswith("late") for name in world.started) <= 64 + 8


def test_whoever_waits_for_an_answer_does_not_wait_for_the_prompts_of_a_crowd():
    world = World("fcfs", max_num_batched_tokens=16)
    for index in range(20):
        world.add(f"bulk{index}", num_prompt=40, max_tokens=4, in_bulk=True)
    world.step()
    world.add("asked", num_prompt=8, max_tokens=1)
    for _ in range(4):
        world.step()
    assert "asked" in world.ended, "only the prompt that was begun came before it"


def test_tenants_share_the_half_whoever_came_first_and_whatever_the_policy():
    for policy in ("fcfs", "priority", "deadline", "fair"):
        world = World(policy, max_num_seqs=16)
        world.add("asked", max_tokens=150)
        for index in range(2 * MAX_EXAMINED):
            world.add(f"a{index}", max_tokens=8, tenant="a", in_bulk=True, priority=-1)
        for _ in range(3):
            world.step()
        assert running(world) == {"a": 8}
        for index in range(20):
            world.add(f"b{index}", max_tokens=8, tenant="b", in_bulk=True)
        for _ in range(40):
            world.step()
        assert running(world).total() == 8 and 3 <= running(world)["b"] <= 5, policy
        while sum(name.startswith("b") for name in world.ended) < 20:
            world.step()
        assert sum(name.startswith("a") for name in world.ended) < 60


def test_those_that_share_most_with_the_cache_go_first_but_not_beyond_the_half():
    world = World("lpm")
    world.add("asked", max_tokens=8)
    for index in range(200):
        world.add(f"bulk{index}", token=7, max_tokens=8, in_bulk=True)
    most = 0
    while "asked" not in world.ended:
        world.step()
        most = max(most, running(world).total())
    assert most == 4


def test_all_end():
    world = World("fair", num_blocks=40)
    for index in range(60):
        world.add(f"r{index}", max_tokens=30, tenant="ab"[index % 2], in_bulk=index % 3 > 0)
    while world.scheduler.has_requests:
        world.step()
    seats = world.tracker.bulk_seats
    assert len(world.ended) == 60 and not running(world) and (seats.num_running, seats.num_others) == (0, 0)
