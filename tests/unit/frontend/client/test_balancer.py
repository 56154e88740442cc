"""Requests are spread over replicas by the work that is open there, and nothing that is counted drifts."""

import random
from collections import OrderedDict

import pytest

from octavo.frontend.client.balancer import Balancer
from octavo.frontend.client.placement import Placement
from octavo.messages.request import EngineOutput, FinishReason, SchedulerStats, Sharing
from tests.fakes import fake_request


def request(name, num_tokens=10, *, rank=None, first=0, **sharing):
    made = fake_request(str(name), list(range(first, first + num_tokens)), 4)
    made.sharing = Sharing(**sharing)
    if rank is not None:
        made.standing = type(made.standing)(0.0, data_parallel_rank=rank)
    return made


def step(balancer, replica, *names, ends=False, used=0):
    reason = FinishReason.STOP if ends else None
    outputs = [EngineOutput(str(name), [1], finish_reason=reason) for name in names]
    balancer.note(replica, outputs, SchedulerStats(num_blocks_used=used, num_blocks=100), 0.0)


def test_equal_replicas_take_turns_and_less_work_wins():
    balancer = Balancer(3, shares_prefixes=False)
    assert [balancer.place(request(i)) for i in range(6)] == [0, 1, 2, 0, 1, 2]
    step(balancer, 1, 1, 4, ends=True)
    assert [balancer.place(request(i)) for i in (6, 7)] == [1, 1]
    balancer.forget("2")
    balancer.forget("5")
    assert balancer.place(request(8, 100)) == 2
    assert balancer.place(request(9)) in (0, 1), "a long prompt that waits counts by its tokens"


def test_a_cache_that_is_nearly_full_counts():
    balancer = Balancer(2, shares_prefixes=False)
    for i in range(4):
        balancer.place(request(i))
    step(balancer, 0, 0, 2, used=90)
    step(balancer, 1, 1, 3, used=10)
    assert [balancer.place(request(i)) for i in range(4, 8)] == [1, 1, 1, 1]


def test_a_known_beginning_attracts_until_there_is_too_much_of_it():
    balancer = Balancer(2)
    homes = [balancer.place(request("a", 256)), balancer.place(request("b", 256, first=500))]
    assert sorted(homes) == [0, 1]
    for i in range(8):
        step(balancer, homes[0], "a", i - 1, ends=True)
        assert balancer.place(request(i, 256)) == homes[0], "its beginning is there"
    step(balancer, homes[1], "b", ends=True)
    assert balancer.place(request("salted", 256, cache_salt="s")) == homes[1], "another salt shares nothing"
    placed = {balancer.place(request(100 + i, 256)) for i in range(40)}
    assert placed == {0, 1}, "more of the same than one replica can do goes to both"


def closed_loop(count, num_prefixes, prefix_tokens=384, at_once=8):
    """Tokens that four places compute, and places that compute each prefix; caches hold six prefixes."""
    chance, placement = random.Random(0), Placement(4)
    caches, size = [OrderedDict() for _ in range(4)], prefix_tokens // 64
    for load in placement.loads:
        load.cache_tokens = 6 * prefix_tokens
    open_at, num_computed, places = [], 0, [set() for _ in range(num_prefixes)]
    for _ in range(count):
        prefix = chance.randrange(num_prefixes)
        keys = [(prefix, block) for block in range(size)]
        place = placement.choose(prefix_tokens + 32, keys)
        num_new = placement.remember(prefix_tokens + 32, keys, place)
        placement.loads[place].waiting_tokens += num_new
        open_at.append((place, num_new))
        places[prefix].add(place)
        num_computed += 32 if prefix in caches[place] else 32 + prefix_tokens
        caches[place][prefix] = True
        caches[place].move_to_end(prefix)
        while len(caches[place]) > 6:
            caches[place].popitem(last=False)
        if len(open_at) >= at_once:
            place, num_new = open_at.pop(chance.randrange(at_once))
            placement.loads[place].waiting_tokens -= num_new
    return num_computed, places


def test_a_beginning_stays_where_it_is_when_all_are_known_everywhere():
    """Caches hold six of sixteen prefixes: in the long run each place computes its own, not all of them."""
    assert closed_loop(2000, 16)[0] / 2000 < 60, "32 are new in each"


def test_what_is_on_its_way_to_a_place_is_hardly_computed_elsewhere():
    """From empty caches on: six requests for each of sixteen prefixes, eight at once."""
    num_computed, places = closed_loop(96, 16)
    assert num_computed < 1.15 * (96 * 32 + 16 * 384)
    assert set.union(*places) == {0, 1, 2, 3}


def test_a_hot_beginning_goes_to_all_though_it_takes_long():
    _, [places] = closed_loop(200, 1, prefix_tokens=1024, at_once=16)
    assert places == {0, 1, 2, 3}


def test_followers_go_where_their_leader_is_and_a_wish_counts():
    balancer = Balancer(4, shares_prefixes=False)
    home = balancer.place(request("leader", hold=True))
    step(balancer, home, "leader", ends=True)
    assert {balancer.place(request(f"child{i}", leader_id="leader")) for i in range(5)} == {home}
    assert {balancer.place(request(i, rank=3)) for i in range(5)} == {3}
    assert balancer.forget("leader") == home
    assert balancer.forget("leader") is None


def test_a_lost_replica_gets_nothing_until_it_is_back():
    balancer = Balancer(2, shares_prefixes=False)
    for i in range(4):
        balancer.place(request(i))
    assert sorted(balancer.lose(0)) == ["0", "2"]
    assert [balancer.place(request(i)) for i in range(4, 8)] == [1] * 4
    assert balancer.place(request("wish", rank=0)) is None
    balancer.loads[0].is_up = True
    assert balancer.place(request(9)) == 0
    balancer.lose(0)
    balancer.lose(1)
    assert balancer.place(request(10)) is None


@pytest.mark.parametrize("count", [30_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_nothing_drifts(count):
    """Unequal requests are aborted, finished, lost: in the end every count is 0 and all had their share."""
    chance, balancer, open_at = random.Random(1), Balancer(4, shares_prefixes=False), [[] for _ in range(4)]
    prompts = [request("", chance.choice([1, 10, 2000])) for _ in range(100)]
    placed = [0] * 4
    for name in range(count):
        made = chance.choice(prompts)
        made.request_id = str(name)
        replica = balancer.place(made)
        placed[replica] += 1
        open_at[replica].append(name)
        at = chance.choice([i for i in range(4) if open_at[i]])  # all are equally fast
        if name > 80 and open_at[at]:
            first = open_at[at].pop(chance.randrange(len(open_at[at])))
            if (end := chance.randrange(3)) == 0:
                step(balancer, at, first)
            if end < 2:
                step(balancer, at, first, ends=True)
            balancer.forget(str(first))
        if not name % 9973:
            assert sorted(map(int, balancer.lose(replica))) == sorted(open_at[replica])
            open_at[replica].clear()
            balancer.loads[replica].is_up = True
    for replica, names in enumerate(open_at):
        step(balancer, replica, *names, ends=True)
    assert all((load.waiting_tokens, load.num_running) == (0, 0) for load in balancer.loads)
    assert not balancer._open
    assert max(placed) - min(placed) < count * 0.05
