"""When the next step is given out: shortly before the device needs it, while few run."""

import sys

import pytest

from octavo.engine.core import EngineCore
from octavo.engine.step_pacing import StepPacing
from tests.fakes import FakeExecutor, fake_config, fake_groups, fake_request

STEP_S, HOST_S = 0.005, 0.0004


class Device(FakeExecutor):
    """Takes STEP_S for a step, one after the other; the host HOST_S to give one out."""

    def __init__(self):
        super().__init__(fake_groups(0))
        self.now = self.ended = 0.0
        self.given = []

    def execute(self, step):
        self.now += HOST_S
        self.ended = ends = max(self.now, self.ended) + STEP_S
        self.given.append(step)
        return Reading(self, super().execute(step), ends)


class Reading:
    """A step of the device."""

    def __init__(self, device, future, ends):
        self.device, self.future, self.ends = device, future, ends

    def done(self):
        return self.device.now >= self.ends

    def result(self):
        self.device.now = max(self.device.now, self.ends)
        return self.future.result()


@pytest.fixture
def device():
    return Device()


@pytest.fixture
def core(device):
    core = EngineCore(fake_config(block_size=4, steps_in_flight=2), device, clock=lambda: device.now)
    core.start()
    return core


def test_the_next_step_waits_for_news_until_the_device_needs_it(core, device):
    core.add(fake_request("a", [1] * 5, 30))
    waits = []
    for _ in range(20):
        waits.append(core.wait_s())
        device.now += waits[-1]
        core.step()
        assert device.ended == pytest.approx(device.now + STEP_S), "the device was idle, or got two steps"
    assert waits[:4] == [0.0] * 4, "nothing is known of how long such steps take"
    assert waits[4:] == pytest.approx([STEP_S - 2 * HOST_S - 0.0005] * 16)
    device.now += core.wait_s()
    core.add(fake_request("b", [2] * 5, 4))
    core.step()
    assert device.given[-1].request_ids == ["a", "b"], "what came meanwhile is part of it"


def test_steps_that_become_shorter_are_followed_late_once(core, device, monkeypatch):
    core.add(fake_request("a", [1] * 5, 40))
    idle = []
    for number in range(30):
        if number == 12:
            monkeypatch.setattr(sys.modules[__name__], "STEP_S", 0.002)
        device.now += core.wait_s()
        idle.append(bool(device.given) and device.now > device.ended)
        core.step()
    assert idle.index(True) == 13 and sum(idle) == 1


def test_many_have_no_time_to_lose(core, device):
    for number in range(65):
        core.add(fake_request(f"r{number}", [1] * 3, 30))
    for _ in range(20):
        assert core.wait_s() == 0.0
        core.step()


def test_a_step_that_ends_sooner_than_its_like_is_followed_at_once():
    now = [0.0]
    pacing = StepPacing(lambda: now[0])

    def step(number, seconds):
        pacing.begin_step(number, now[0], is_late=False)
        now[0] += seconds
        pacing.end_step()

    for _ in range(4):
        step(8, 0.010)
    step(15, 0.003)
    pacing.begin_step(9, now[0], is_late=False)
    assert pacing.due_s() == pytest.approx(now[0] + 0.0025), "the shortest of the last ones alike"
    pacing.end_step()
    pacing.begin_step(16, now[0], is_late=False)
    assert pacing.due_s() == 0.0, "others are not alike"
