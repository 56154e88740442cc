"""The tuner's search against whole grids, its state, its spaces; what the command writes."""

import itertools
import json
import math

import pytest
import yaml

from octavo.base.errors import ConfigError, OctavoError
from octavo.bench.tune.report import story, trial_line, written
from octavo.bench.tune.search import Search, State, Trial
from octavo.bench.tune.space import Axis, default_space, read_space, without
from octavo.cli.main import main

AXES = [
    Axis("seqs", ({}, *({"seqs": n} for n in (4, 8, 32, 64)))),
    Axis("tokens", ({}, *({"tokens": n} for n in (128, 512, 2048)))),
    Axis("threads", ({}, {"threads": 1})),
    Axis("drafts", ({}, {"drafts": 2}, {"drafts": 4})),
]


def speed(options, shift=0):
    """Tokens per second of a made-up server, whose axes depend on each other."""
    seqs, tokens = options.get("seqs", 16), options.get("tokens", 1024)
    rate = (
        100 - 9 * (math.log2(seqs) - 5 + shift % 2) ** 2 - 4 * (math.log2(tokens / seqs) - 5 + shift % 3) ** 2
    )
    rate *= 1.2 if options.get("drafts") == (2 if seqs < 32 else 4) else 1
    return max(1.0, rate * (0.8 if "threads" in options else 1))


class Clocked:
    """Measures `speed`; each point takes ten seconds of a clock that stands still otherwise.

    stop: calls before it is interrupted
    """

    def __init__(self, shift=0, bad=(), stop=math.inf):
        self.now, self.calls, self.shift, self.bad, self.stop = 0.0, [], shift, bad, stop

    def __call__(self, options):
        if len(self.calls) == self.stop:
            raise KeyboardInterrupt
        self.now += 10
        self.calls.append(options)
        if options in self.bad:
            return Trial(options, None, 10, error="it did not start")
        return Trial(options, speed(options, self.shift), 10)

    def search(self, budget_s, **more):
        return Search(AXES, self, budget_s=budget_s, clock=lambda: self.now, **more)


def grid():
    for point in itertools.product(*(axis.choices for axis in AXES)):
        yield {name: value for choice in point for name, value in choice.items()}


@pytest.mark.parametrize("shift", range(6))
def test_the_search_finds_what_a_whole_grid_finds_in_a_third_of_its_time(shift):
    best = max(speed(options, shift) for options in grid())
    measure = Clocked(shift)
    found = measure.search(10 * len(list(grid())) / 3).run()
    assert len(measure.calls) <= 40
    assert found.score >= 0.95 * best > speed({}, shift)


def test_a_search_without_time_for_more_has_the_defaults():
    measure = Clocked()
    search = measure.search(1)
    assert search.run() is search.default and measure.calls == [{}]
    assert search.default.score < 0.95 * max(map(speed, grid()))  # the grid's best must be searched for


def test_with_time_enough_every_point_is_measured_once_and_the_best_three_times():
    measure = Clocked()
    search = measure.search(1e9)
    found = search.run()
    assert found.score == max(map(speed, grid()))
    num_points, again = len(list(grid())), measure.calls[search.num_trials :]
    assert search.num_trials == num_points == len({json.dumps(point) for point in measure.calls})
    assert again == again[:3] * 2 and found.options == again[0]
    assert sorted(map(speed, grid()))[-3:] == sorted(map(speed, again[:3]))


@pytest.mark.parametrize("stop", [1, 7, 100, 120, 122, 125])
def test_a_search_that_is_interrupted_anywhere_measures_nothing_twice(tmp_path, stop):
    whole, first, second, path = Clocked(), Clocked(stop=stop), Clocked(), tmp_path / "tune.json"
    expected = whole.search(1e9).run()
    with pytest.raises(KeyboardInterrupt):
        first.search(1e9, state=State(path, {})).run()
    found = second.search(1e9, state=State(path, {})).run()
    assert found == expected
    assert first.calls + second.calls == whole.calls and len(first.calls) == stop


class Lucky:
    """Two points and the defaults, whose scores are given call by call; None: it fails."""

    axes = (Axis("a", ({}, {"a": 1}, {"a": 2})),)

    def __init__(self, **scores):
        self.now, self.calls, self.scores = 0.0, "", {name: iter(given) for name, given in scores.items()}

    def __call__(self, options):
        self.now += 10
        name = f"a{options['a']}" if options else "defaults"
        self.calls += name[-1]
        return Trial(options, next(self.scores[name]), 10)

    def found(self, budget_s):
        return Search(self.axes, self, budget_s=budget_s, clock=lambda: self.now).run()


def test_the_best_are_measured_again_in_turn_and_luck_is_not_enough():
    lucky = Lucky(defaults=[100, 101, 99], a1=[108, 97, 96], a2=[50])
    best = lucky.found(1e9)
    assert (best.options, best.median, lucky.calls) == ({}, 100, "s121s1s")
    assert "     100.00" in trial_line(best, True) and trial_line(best, True).endswith("(the median of 3)")
    fails = Lucky(defaults=[100, 99, 98], a1=[108, None, None], a2=[98, 90, 90])
    assert fails.found(1e9).options == {} and fails.calls == "s121s21s2"
    behind = Lucky(defaults=[100], a1=[120], a2=[50])
    assert behind.found(1e9).options == {"a": 1} and behind.calls == "s12", "nobody else can be the best"


def test_there_is_time_for_whole_rounds_only():
    lucky = Lucky(defaults=[100, 100], a1=[105, 90], a2=[98, 98])
    assert lucky.found(50).options == {} and lucky.calls == "s121s", "the best two, once"
    assert Lucky(defaults=[100], a1=[105], a2=[98]).found(40).options == {"a": 1}


def test_a_search_goes_on_where_the_time_was_over(tmp_path):
    whole = Clocked()
    expected = whole.search(300).run()
    first, path = Clocked(), tmp_path / "tune.json"
    first.search(100, state=State(path, {"model": "m"})).run()
    second = Clocked()
    found = second.search(230, state=State(path, {"model": "m"})).run()
    assert found.options == expected.options
    points = [
        list(dict.fromkeys(map(json.dumps, calls))) for calls in (first.calls + second.calls, whole.calls)
    ]
    assert points[0] == points[1] and len(first.calls) + len(second.calls) <= 33
    with pytest.raises(ConfigError, match="is of another search"):
        State(path, {"model": "other"})
    path.write_text("[]")
    with pytest.raises(ConfigError, match="is no state of the tuner"):
        State(path, {"model": "m"})


def test_what_does_not_start_is_passed_over():
    measure = Clocked(bad=[{"seqs": 32}])
    found = measure.search(1e9).run()
    assert found.score == max(speed(options) for options in grid() if options != {"seqs": 32})
    with pytest.raises(OctavoError, match="The defaults cannot be measured: it did not start"):
        Clocked(bad=[{}]).search(100).run()


def test_spaces():
    names = {axis.name for axis in default_space(num_gpus=0, num_cores=4, rounds=False)}
    assert {"max_num_seqs", "max_num_batched_tokens", "block_size", "cpu_threads", "speculation"} == names
    rounding = {axis.name for axis in default_space(num_gpus=0, num_cores=4, rounds=True)} - names
    assert rounding == {"activations", "kv_cache_dtype", "quantization"}
    [shape, *_] = default_space(num_gpus=4, num_cores=4, rounds=False)
    assert {"tensor_parallel_size": 2, "data_parallel_size": 2} in shape.choices and len(shape.choices) == 6
    assert default_space(num_gpus=1, num_cores=4, rounds=False)[0].name == "max_num_seqs"
    rest = without(
        default_space(num_gpus=0, num_cores=4, rounds=False), {"max_num_seqs": 3, "speculative_config": {}}
    )
    assert {axis.name for axis in rest} == names - {"max_num_seqs", "speculation"}


def test_every_option_of_the_spaces_is_one():
    from octavo.config.args import EngineArgs

    axes = [axis for gpus in (0, 8) for axis in default_space(num_gpus=gpus, num_cores=4, rounds=True)]
    names = {name for axis in axes for choice in axis.choices for name in choice}
    assert names <= set(EngineArgs.__dataclass_fields__)


def test_a_space_of_one_s_own(tmp_path):
    path = tmp_path / "space.json"
    path.write_text(json.dumps({"max_num_seqs": [1, 2]}))
    assert read_space(str(path), ["max_num_seqs"])[0].choices == (
        {},
        {"max_num_seqs": 1},
        {"max_num_seqs": 2},
    )
    for content, text in (
        ('{"max_num_seq": [1]}', "no option. Did you mean max_num_seqs"),
        ("[1]", "lists of values"),
    ):
        path.write_text(content)
        with pytest.raises(ConfigError, match=text):
            read_space(str(path), ["max_num_seqs"])


def test_what_is_written_is_a_config_with_its_reasons(tmp_path):
    default = Trial({}, 50.0, 1, bound="queue", notes=["Queue-bound: every place is taken."])
    best = Trial({"max_num_seqs": 64}, 75.0, 1, notes=["Bandwidth-bound: few tokens.", "    running 3"])
    told = story(default, best, "output tokens/s", 9)
    assert told[0] == "75.00 output tokens/s (defaults: 50.00, +50.0 %); 9 points measured"
    assert "with the defaults: Queue-bound" in told[1] and "Bandwidth-bound" in told[2]
    path = tmp_path / "tuned.yaml"
    written(path, "m", {"max_model_len": 512}, best, told)
    assert path.read_text().startswith("# 75.00 output tokens/s")
    assert yaml.safe_load(path.read_text()) == {"model": "m", "max_model_len": 512, "max_num_seqs": 64}
    assert trial_line(Trial({}, None, 1, error="no"), False) == "  failed: no  defaults"


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--objective", "goodput"], "needs limits: --goodput"),
        (["--goodput", "ttft"], "Invalid format found for service level objectives"),
        (["--objective", "speed"], "'speed' is none of throughput, goodput"),
        (["--time-budget", "0"], "must be greater than 0"),
        (["--backend", "openai-embeddings"], "The tuner measures generated text"),
        (["--space", "none.json"], "none.json cannot be read"),
    ],
)
def test_mistakes_are_told_before_anything_starts(flags, text, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["tune", "smollm2", *flags]) == 2
    assert text in capsys.readouterr().err
