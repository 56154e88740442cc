"""A core that hangs is told from one that works long; when a dead core is started again."""

import pytest

from octavo.frontend.client.restart import RestartPolicy
from octavo.frontend.client.stall import StallWatch
from octavo.messages.request import SchedulerStats


class Watched:
    """A StallWatch with a clock and a core that uses CPU time, both moved by hand."""

    def __init__(self, timeout_s=8.0, on_cpu=False, sizes=1):
        self.now = 100.0
        self.cpu_s = 50.0
        self.rank_s = [20.0, 30.0]
        self.num_steps = 0
        self.watch = StallWatch(
            timeout_s, lambda: [self.cpu_s, *self.rank_s][:sizes], lambda: self.now, on_cpu=on_cpu
        )

    def seconds_until_stalled(self, limit_s=1000.0, *, busy=0.0, each_look=lambda: None):
        """Look at regular times; busy: share of a CPU that the core uses."""
        begun = self.now
        while self.now - begun < limit_s:
            self.now += self.watch.interval_s
            self.cpu_s += busy * self.watch.interval_s
            each_look()
            if self.watch.is_stalled():
                return self.now - begun
        return None

    def speak(self, *, steps=0, has_work=True):
        self.num_steps += steps
        self.watch.note(SchedulerStats(num_steps=self.num_steps, has_work=has_work))


def test_silence_without_cpu_time():
    assert 8.0 <= Watched().seconds_until_stalled() <= 10.0


def test_steps_and_idleness_are_life():
    watched = Watched()
    assert watched.seconds_until_stalled(each_look=lambda: watched.speak(steps=1)) is None
    assert watched.seconds_until_stalled(each_look=lambda: watched.speak(has_work=False)) is None
    assert watched.seconds_until_stalled() <= 10.0


def test_a_long_step_is_not_a_hang_but_an_endless_one_is():
    watched = Watched()
    assert watched.seconds_until_stalled(60.0, busy=0.3) is None
    watched.speak(steps=1)
    assert 80.0 <= watched.seconds_until_stalled(busy=0.3) <= 90.0


def test_most_patience_is_due_to_a_cpu():
    watched = Watched(on_cpu=True)
    assert 480.0 <= watched.seconds_until_stalled(busy=0.3) <= 490.0


def test_one_rank_of_several_that_hangs_while_the_others_wait_for_it():
    """They spin, and so use a CPU: as long as all do, it is a long step."""
    watched = Watched(sizes=3)

    def spin(*ranks):
        for rank in ranks:
            watched.rank_s[rank] += watched.watch.interval_s

    assert watched.seconds_until_stalled(60.0, busy=1.0, each_look=lambda: spin(0, 1)) is None
    assert watched.seconds_until_stalled(busy=1.0, each_look=lambda: spin(0)) <= 16.0


def test_a_step_that_computes_and_then_hangs():
    watched = Watched()
    assert watched.seconds_until_stalled(12.0, busy=1.0) is None
    assert watched.seconds_until_stalled() <= 16.0


def test_a_loop_that_runs_without_making_steps():
    watched = Watched()
    assert watched.seconds_until_stalled(busy=1.0, each_look=watched.speak) <= 10.0


def test_a_long_step_behind_a_word():
    """What an earlier step brought may be told after the next has begun; that next one may be long."""
    watched = Watched()
    assert watched.seconds_until_stalled(2.0, busy=0.3) is None
    watched.speak()
    assert watched.seconds_until_stalled(60.0, busy=0.03) is None


def test_outputs_are_progress():
    watched = Watched()

    def tell():
        watched.watch.note(SchedulerStats(num_steps=0, has_work=True), has_outputs=True)

    assert watched.seconds_until_stalled(100.0, each_look=tell) is None


def test_a_front_that_was_stopped_blames_nobody():
    watched = Watched()
    watched.speak(steps=1)
    assert not watched.watch.is_stalled()
    watched.now += 3600
    assert not watched.watch.is_stalled()
    watched.speak(steps=1)
    assert not watched.watch.is_stalled()


def test_cpu_time_is_asked_for_only_when_there_is_no_progress():
    asked = []
    watch = StallWatch(8.0, lambda: asked.append(1) or [0.0], lambda: 0.0)
    for step in range(100):
        watch.note(SchedulerStats(num_steps=step, has_work=True))
        watch.is_stalled()
    assert len(asked) <= 1  # the first look comes before the first step


@pytest.mark.parametrize(
    ("deaths_s", "delays_s"),
    [
        ([0, 1, 2, 3, 4], [0.0, 1.0, 2.0, 4.0, None]),
        ([0, 100, 200], [0.0, 0.0, 0.0]),
        ([0, 30, 59, 61, 70], [0.0, 1.0, 2.0, 2.0, 4.0]),
    ],
)
def test_restarts(deaths_s, delays_s):
    times = iter(deaths_s)
    policy = RestartPolicy(lambda: next(times))
    assert [policy.delay_s() for _ in deaths_s] == delays_s
