"""Grammars in the core, over a runner that chooses any allowed token: alone, in company, failing."""

import json
import re
import time

import msgspec
import numpy as np
import pytest

from octavo.base.errors import RequestError
from octavo.engine.structured import matchers
from octavo.engine.structured.guidance import GuidanceBackend, GuidanceMatcher
from octavo.messages.request import FinishReason
from octavo.messages.sampling import SamplingParams
from octavo.messages.structured import ReasoningMarks
from tests.fakes import fake_request
from tests.structured import EOS, ByteEngine, text

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
}
FORMS = [
    {"json": PERSON},
    {"regex": r"\d{3}-[a-f]{2,9}"},
    {"choice": ["positive", "negative"]},
    {"grammar": 'root ::= "a" root "b" | "c"'},
    {},
]
CONDITIONS = {
    "batched": {},
    "chunked": {"max_num_batched_tokens": 7},
    "preempted": {"num_blocks": 52, "max_model_len": 200},
    "two_in_flight": {"steps_in_flight": 2},
    "three_in_flight_and_preempted": {"steps_in_flight": 3, "num_blocks": 52, "max_model_len": 200},
}


def requests(engine):
    for index in range(40):
        form = FORMS[index % len(FORMS)]
        prompt = [7] * 10 + [index] * (index % 6 + 1)
        yield engine.request(f"r{index}", 100, index, prompt, **form)


@pytest.fixture(scope="module")
def solo(tmp_path_factory):
    """Every request alone."""
    engine = ByteEngine(tmp_path_factory.mktemp("solo"), enable_prefix_caching=False)
    ends = {}
    for request in requests(engine):
        ends |= engine.run([request])
    return ends


@pytest.mark.parametrize("condition", CONDITIONS)
def test_in_company_as_alone(tmp_path, solo, condition):
    engine = ByteEngine(tmp_path, **CONDITIONS[condition])
    ends = engine.run(requests(engine))
    assert {i: (t, o.finish_reason) for i, (t, o) in ends.items()} == {
        i: (t, o.finish_reason) for i, (t, o) in solo.items()
    }
    if "preempted" in condition:
        assert engine.core.scheduler.stats().num_preemptions > 0


def test_forms_are_kept(solo):
    for index in range(40):
        tokens, last = solo[f"r{index}"]
        if FORMS[index % 5] == {"json": PERSON} and last.finish_reason is FinishReason.STOP:
            assert set(json.loads(text(tokens))) >= {"name", "age"}
        if FORMS[index % 5] == FORMS[1]:
            assert re.fullmatch(FORMS[1]["regex"], text(tokens))
        if FORMS[index % 5] == FORMS[2]:
            assert text(tokens) in ("positive", "negative") and last.ended_by_text
        if FORMS[index % 5] == FORMS[3]:
            assert re.fullmatch("a*cb*", text(tokens)) and last.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("steps_in_flight", [2, 3])
def test_masks_follow_so_that_nobody_sits_a_step_out(tmp_path, steps_in_flight):
    engine = ByteEngine(tmp_path, steps_in_flight=steps_in_flight)
    engine.core.add(engine.request("plain", 40, eos=[]))
    engine.core.add(engine.request("formed", 30, eos=[], regex="[a-z]*"))
    engine.drain()
    parts = [step.request_ids for step in engine.executor.steps]
    assert [number for number, ids in enumerate(parts) if "plain" in ids] == list(range(40))
    assert [number for number, ids in enumerate(parts) if "formed" in ids] == list(range(30))
    follow = [step.masks_follow for step in engine.executor.steps]
    assert follow == [False] + [True] * 29 + [False] * 10


def test_one_step_at_a_time_has_its_masks_at_once(tmp_path):
    engine = ByteEngine(tmp_path)
    engine.run([engine.request("formed", 20, regex="[a-z]{9}"), engine.request("plain", 20, eos=[])])
    assert not any(step.masks_follow for step in engine.executor.steps)
    assert engine.executor.steps[0].token_masks.indexes == [0]


@pytest.mark.parametrize("leaving", ["plain", "formed", "both", "late"])
def test_ending_between_a_step_and_its_masks(tmp_path, leaving):
    """Three in flight, the last of which waits for two to be read: in between, requests end."""
    alone = ByteEngine(tmp_path).run(
        wave := [ByteEngine(tmp_path).request("formed", 30, 5, regex="[a-z]{9}")]
    )
    engine = ByteEngine(tmp_path, steps_in_flight=3)
    engine.core.add(engine.request("plain", 40, eos=[]))
    engine.core.step()
    engine.core.add(wave[0])
    while not engine.core.scheduler.awaits_masks:
        engine.core.step()
    gone = {"both": ["plain", "formed"], "late": ["formed"]}.get(leaving, [leaving])
    if leaving == "late":
        [timed_out] = engine.core.scheduler.time_out(gone)
        assert timed_out.finish_reason is FinishReason.TIMEOUT
    else:
        engine.core.abort(gone)
    engine.core.add(engine.request("next", 30, regex="[a-z]{5}"))
    ends = engine.drain()
    assert ends.keys() == {"plain", "formed", "next"} - set(gone)
    assert re.fullmatch("[a-z]{5}", text(ends["next"][0]))
    if "formed" in ends:
        assert ends["formed"][0] == alone["formed"][0][-len(ends["formed"][0]) :]
    assert engine.core.scheduler.stats().num_blocks_used == 0


def test_a_command_finds_no_step_half_done(tmp_path):
    engine = ByteEngine(tmp_path, steps_in_flight=3)
    engine.core.add(engine.request("plain", 40, eos=[]))
    engine.core.step()
    engine.core.add(engine.request("formed", 30, regex="[a-z]{9}"))
    while not engine.core.scheduler.awaits_masks:
        engine.core.step()
    engine.core.call("pause", {"freeze": True})
    assert not engine.core.scheduler.awaits_masks
    engine.core.call("resume", {})
    assert re.fullmatch("[a-z]{9}", text(engine.drain()["formed"][0])[-9:])


def test_children_follow_a_leader_each_on_their_own_way(tmp_path):
    engine = ByteEngine(tmp_path)
    family = [
        engine.request(f"c{i}", 50, i, list(range(20)), regex="[a-z]{8}", leader_id="c0" if i else "")
        for i in range(4)
    ]
    ends = engine.run(family)
    assert all(re.fullmatch("[a-z]{8}", text(tokens)) for tokens, _ in ends.values())
    assert len({tuple(tokens) for tokens, _ in ends.values()}) == 4


def test_the_end_of_text_comes_only_where_the_grammar_admits_it(tmp_path):
    engine = ByteEngine(tmp_path)
    for seed in range(30):
        [(tokens, last)] = engine.run([engine.request("r", 50, seed, regex="(ab)+")]).values()
        if last.finish_reason is FinishReason.STOP:
            assert tokens[-1] == EOS and not last.ended_by_text
            assert re.fullmatch("(ab)+", text(tokens[:-1]))


def test_ignoring_the_end_of_text(tmp_path):
    engine = ByteEngine(tmp_path)
    [(tokens, last)] = engine.run([engine.request("r", 50, regex="(ab)+", eos=[])]).values()
    assert (len(tokens), last.finish_reason) == (50, FinishReason.LENGTH)
    [(tokens, last)] = engine.run([engine.request("s", 50, regex="(ab){3}", eos=[])]).values()
    assert (text(tokens), last.finish_reason) == ("ababab", FinishReason.STOP)


def test_min_tokens_does_not_hold_back_what_is_complete(tmp_path):
    engine = ByteEngine(tmp_path)
    sampling = SamplingParams(min_tokens=20, max_tokens=50)
    [(tokens, last)] = engine.run([engine.request("r", 50, choice=["abc"], sampling=sampling)]).values()
    assert (text(tokens), last.finish_reason) == ("abc", FinishReason.STOP)


def test_a_stop_token_ends_an_output_in_its_midst(tmp_path):
    engine = ByteEngine(tmp_path)
    sampling = SamplingParams(stop_token_ids=[ord("b")], max_tokens=50)
    [(tokens, last)] = engine.run([engine.request("r", 50, choice=["abc"], sampling=sampling)]).values()
    assert (text(tokens), last.stop_reason, last.ended_by_text) == ("ab", ord("b"), False)


def test_a_failure_in_a_step_ends_its_request_alone(tmp_path, monkeypatch):
    take = GuidanceMatcher.take

    def lose_x(self, token_id):
        return take(self, ord("!") if token_id == ord("x") else token_id)

    monkeypatch.setattr(GuidanceMatcher, "take", lose_x)
    engine = ByteEngine(tmp_path)
    good, bad = (engine.request(name, choice=[word]) for name, word in (("good", "abcd"), ("bad", "abxcd")))
    ends = engine.run([bad, good, engine.request("plain", 9, eos=[])])
    assert ends["bad"][1].finish_reason is FinishReason.ERROR
    assert ends["bad"][1].error.startswith("Grammar error: ")
    assert text(ends["good"][0]) == "abcd"
    assert len(ends["plain"][0]) == 9
    assert engine.core.scheduler.stats().num_blocks_used == 0


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("place", ["advance", "masks"])
def test_a_bug_of_the_library_ends_its_request_alone(tmp_path, monkeypatch, place, steps_in_flight):
    """Raised by the matcher of one request, in company."""
    engine = ByteEngine(tmp_path, steps_in_flight=steps_in_flight)
    wave = [engine.request(name, choice=[word]) for name, word in (("good", "abcd"), ("bad", "wxyz"))]
    take, masks, consumed = GuidanceMatcher.take, GuidanceBackend.masks, {}

    def failing_take(self, token_id):
        consumed[self] = token_id
        if place == "advance" and token_id == ord("x"):
            raise ValueError("a bug")
        return take(self, token_id)

    def failing_masks(self, matchers):
        if place == "masks" and any(consumed.get(matcher) == ord("x") for matcher in matchers):
            raise ValueError("a bug")
        return masks(self, matchers)

    monkeypatch.setattr(GuidanceMatcher, "take", failing_take)
    monkeypatch.setattr(GuidanceBackend, "masks", failing_masks)
    ends = engine.run([*wave, engine.request("plain", 9, eos=[])])
    assert ends["bad"][1].finish_reason is FinishReason.ERROR
    assert "The grammar failed" in ends["bad"][1].error
    assert text(ends["good"][0]) == "abcd"
    assert len(ends["plain"][0]) == 9


@pytest.mark.parametrize("fault", [RequestError("too large"), ValueError("a bug of the library")])
def test_what_cannot_be_compiled_here_ends_with_an_error(tmp_path, monkeypatch, fault):
    def fail(self, grammar):
        raise fault

    engine = ByteEngine(tmp_path)
    request = engine.request("bad", choice=["a"])
    monkeypatch.setattr(GuidanceBackend, "compile", fail)
    engine.core.prepare(request)
    [(tokens, last)] = engine.run([request]).values()
    assert (tokens, last.finish_reason) == ([], FinishReason.ERROR)
    assert ("too large" in last.error) == isinstance(fault, RequestError)


def test_a_vocabulary_that_is_gone_ends_the_request_alone(tmp_path):
    engine = ByteEngine(tmp_path)
    request = engine.request("bad", choice=["a"])
    request.constraint.vocabulary = str(tmp_path / "nothing")
    ends = engine.run([request, fake_request("plain", [1], 3)])
    assert "cannot read the vocabulary" in ends["bad"][1].error
    assert ends["plain"][1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    "regex",
    [
        "(x+x+)+y",
        "(.*a.{200}){1,50}",
        "(((a{0,100}b){0,100}c){0,100}d){0,1000}",
        r"(\p{L}{1,50}.*){40}",
        "|".join(f".*{number}.*" for number in range(1000)),
    ],
)
def test_a_regex_bomb_is_bounded_while_it_runs(tmp_path, regex):
    """It may run into the limits of the library, alone; no step takes long."""
    engine = ByteEngine(tmp_path)
    for seed in range(3):
        engine.core.add(engine.request(f"bomb{seed}", 150, seed, regex=regex))
    engine.core.add(engine.request("plain", 100, eos=[]))
    ends, slowest = {}, 0.0
    while engine.core.has_work():
        start = time.process_time()
        outputs = engine.core.step().outputs
        slowest = max(slowest, time.process_time() - start)
        ends |= {output.request_id: output.finish_reason for output in outputs if output.finish_reason}
    assert ends.pop("plain") is FinishReason.LENGTH
    assert set(ends.values()) <= {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR}
    assert slowest < 1.0


def test_what_was_compiled_is_shared_and_bounded(tmp_path, monkeypatch):
    compiled = []
    compile_grammar = GuidanceBackend.compile

    def count(self, grammar):
        compiled.append(grammar)
        return compile_grammar(self, grammar)

    monkeypatch.setattr(GuidanceBackend, "compile", count)
    monkeypatch.setattr(matchers, "_MAX_CACHE_BYTES", 3 << 20)
    engine = ByteEngine(tmp_path)
    for word in ("aa", "aa", "bb", "cc", "aa"):
        request = engine.request("r", choice=[word])
        engine.core.prepare(request)
        engine.run([request])
    assert [re.search("aa|bb|cc", grammar)[0] for grammar in compiled] == ["aa", "bb", "cc", "aa"]


def test_a_constraint_crosses_the_door(tmp_path):
    request = ByteEngine(tmp_path).request("r", choice=["a"])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=type(request)) == request


def reasoning_requests(engine, marks):
    for index in range(12):
        request = engine.request(f"r{index}", 600, index, [7] * 10 + [index], json=PERSON)
        request.constraint.reasoning = marks
        yield request


@pytest.mark.parametrize(
    ("condition", "opening"), list(zip(CONDITIONS, ["", "<", "<%", "<", ""], strict=True))
)
def test_a_grammar_holds_after_the_reasoning(tmp_path, condition, opening):
    """Any token is sampled: what is before the closing is free, but no end; what is after has the form."""
    options = CONDITIONS[condition] | {"max_model_len": 700}
    if "num_blocks" in options:
        options["num_blocks"] = 180
    engine = ByteEngine(tmp_path, **options)
    marks = ReasoningMarks(list(b"#"), list(opening.encode()))
    ends = engine.run(reasoning_requests(engine, marks)).values()
    thoughts, num_stopped = [], 0
    for tokens, last in ends:
        assert last.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        data = bytes(token for token in tokens if token < 256)
        reasons = not opening or data.startswith(opening.encode())
        thought, closing, answer = data.partition(b"#") if reasons else (b"", b"", data)
        thoughts.append(thought)
        assert EOS not in tokens[:-1]
        if last.finish_reason is FinishReason.STOP:
            num_stopped += 1
            assert bool(closing) == reasons
            assert set(json.loads(answer)) >= {"name", "age"}
    assert num_stopped > 4
    assert any(len(thought) > 20 for thought in thoughts) and len(set(thoughts)) > 1


def test_an_end_of_text_may_have_any_number(tmp_path):
    """One whose bit is the sign of its word, too."""
    engine = ByteEngine(tmp_path)
    matcher = engine.core._matchers.open_matcher(engine.request("r", 10, 1, json=PERSON))
    matcher.hidden_ids = (31, 63)
    bits = np.frombuffer(engine.core._matchers.token_masks([(0, matcher)]).bits, np.uint32)
    assert not bits[0] >> 31 and not bits[1] >> 31


def test_what_many_outputs_of_a_grammar_hold_counts(tmp_path):
    """Every few that are open at once have a lexer of their own; with others it stays within the bound."""
    engine = ByteEngine(tmp_path)
    matchers, request = engine.core._matchers, engine.request("r", 10, json=PERSON)
    alone = matchers.open_matcher(request)
    size = matchers._compiled.num_bytes
    rows = [matchers.open_matcher(request) for _ in range(40)]
    count = alone.compiled.num_instances
    assert count > 1 and matchers._compiled.num_bytes == count * size
    assert len({id(row.compiled._grammar) for row in [alone, *rows]}) == 1
