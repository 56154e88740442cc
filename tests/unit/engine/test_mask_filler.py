"""A request whose masks take too long fails, and it alone; where all are quick nobody looks closer."""

import numpy as np
import pytest

from octavo.base.errors import RequestError
from octavo.engine.structured import mask_filler
from octavo.engine.structured.mask_filler import MAX_SLOW_S, SLOW_S, MaskFiller
from octavo.engine.structured.request_matcher import RequestMatcher
from tests.structured import ByteEngine

AMBIGUOUS = 'start: s\ns: s s s | s s | "a" | "b"'


class Clocked:
    """A back end whose masks take the seconds that its matchers are; the numbers of masks filled together."""

    def __init__(self, monkeypatch):
        self.now, self.calls = 0.0, []
        monkeypatch.setattr(mask_filler, "perf_counter", lambda: self.now)
        monkeypatch.setattr(mask_filler, "thread_time", lambda: self.now)

    def masks(self, matchers):
        self.calls.append(len(matchers))
        self.now += sum(matchers)
        return [np.ones(2, np.int32)] * len(matchers)


@pytest.fixture
def backend(monkeypatch):
    return Clocked(monkeypatch)


def fill(backend, *seconds, times=40, filler=None):
    filler = filler or MaskFiller()
    matchers = [RequestMatcher(each, backend) for each in seconds]
    for _ in range(times):
        for matcher, mask in zip(matchers, filler.masks(backend, matchers), strict=True):
            assert matcher.failure or mask.all()
    return matchers


def test_the_slow_one_fails(backend):
    quick, slow, large = fill(backend, 0.0001, 4 * SLOW_S, 0.9 * SLOW_S)
    assert "Ambiguous" in slow.failure and not quick.failure and not large.failure
    assert slow.slow_s <= MAX_SLOW_S + 4 * SLOW_S
    with pytest.raises(RequestError, match="too slow"):
        slow.feed(1)


def test_quick_ones_are_filled_together(backend):
    fill(backend, *[0.0002] * 20)
    assert set(backend.calls) == {20}


def test_many_ordinary_masks_stay_together(backend, monkeypatch):
    """256 of them take longer than one that is slow; so would they one by one."""
    monkeypatch.setattr(mask_filler, "usable_cores", lambda: 4)
    fill(backend, *[0.0003] * 256)
    assert set(backend.calls) == {256}


def test_a_slow_one_in_a_large_company_is_found(backend, monkeypatch):
    monkeypatch.setattr(mask_filler, "usable_cores", lambda: 16)
    slow, *others = fill(backend, 4 * SLOW_S, *[0.0001] * 255)
    assert slow.failure and not any(other.failure for other in others)


def test_one_slow_step_of_all_accuses_nobody(backend):
    filler = MaskFiller()
    assert not any(m.failure or m.slow_s for m in fill(backend, *[0.002] * 20, times=100, filler=filler))
    assert max(backend.calls) == 20


def test_a_request_alone_is_timed_too(backend):
    assert fill(backend, 2 * SLOW_S)[0].failure


def test_an_ambiguous_grammar_ends_its_own_request(tmp_path, monkeypatch):
    monkeypatch.setattr(mask_filler, "SLOW_S", 0.002)
    monkeypatch.setattr(mask_filler, "MAX_SLOW_S", 0.05)
    engine = ByteEngine(tmp_path)
    requests = [
        engine.request("bad", 400, eos=[], grammar=AMBIGUOUS),
        engine.request("good", 100, regex="[ab]{90,}"),
        engine.request("plain", 100),
    ]
    ends = engine.run(requests)
    assert "The grammar is too slow" in ends["bad"][1].error and len(ends["bad"][0]) < 200
    assert not ends["good"][1].error and len(ends["good"][0]) >= 90
    assert not ends["plain"][1].error
