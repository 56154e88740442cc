"""Layers are cut into stages of equal cost, and a stage keeps its own layers of every cache group."""

import itertools
import random

import pytest

from octavo.base.errors import ConfigError
from octavo.messages.kv import HeadsKV
from octavo.runtime.distributed.stages import cut_layers
from octavo.runtime.worker.kv_tensors import group_layers, of_stage


def test_the_costliest_stage_costs_least():
    chance = random.Random(0)
    for _ in range(50):
        costs = [chance.randrange(1, 20) for _ in range(chance.randrange(3, 9))]
        head, count = chance.randrange(30), chance.randrange(1, 4)
        stages = cut_layers(costs, head, count)
        assert [i for stage in stages for i in stage] == list(range(len(costs)))

        def largest(ends, costs=costs, head=head):
            bounds = itertools.pairwise([0, *ends, len(costs)])
            sums = [sum(costs[start:end]) for start, end in bounds]
            return max([*sums[:-1], sums[-1] + head])

        best = min(map(largest, itertools.combinations(range(1, len(costs)), count - 1)))
        assert largest([stage.stop for stage in stages[:-1]]) == best


def test_equal_layers_and_a_large_head():
    assert cut_layers([10] * 12, 0, 3) == [range(4), range(4, 8), range(8, 12)]
    assert cut_layers([10] * 12, 40, 2) == [range(8), range(8, 12)]


def test_more_stages_than_layers():
    with pytest.raises(ConfigError, match="pipeline_parallel_size=3 is more than the 2 layers of the model"):
        cut_layers([1, 1], 0, 3)


def test_all_stages_have_the_same_groups():
    full, window = HeadsKV(1, 8, "float32", 64), HeadsKV(1, 8, "float32", 64, 16)
    groups = group_layers([window, window, full, window, window, full], 16)
    halves = [of_stage(groups, own) for own in (range(3), range(3, 6))]
    assert [[group.spec for group in half] for half in halves] == [[group.spec for group in groups]] * 2
    kept = [sorted(i for group in half for i in group.layers) for half in halves]
    assert kept == [[0, 1, 2]] * 2
    assert of_stage(groups, None) == groups
