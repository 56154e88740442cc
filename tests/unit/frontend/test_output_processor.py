"""From the core's outputs to what users see: kinds, stops, logprobs, n > 1, ends."""

import time

import pytest

from octavo.base.errors import RequestError
from octavo.frontend.output_processor import OutputProcessor
from octavo.frontend.outputs.logprobs import Logprob
from octavo.frontend.requests.input_processor import InputProcessor
from octavo.messages.request import EngineOutput, EngineOutputs, FinishReason, SchedulerStats, TokenLogprobs
from octavo.messages.sampling import RequestOutputKind, SamplingParams
from tests.fakes import ByteTokenizer, fake_config

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind
TOKENIZER = ByteTokenizer()
CONFIG = fake_config(max_model_len=1000)


class Driver:
    """One request, driven step by step by hand."""

    def __init__(self, prompt="prompt", *, tokenizer=TOKENIZER, processor=None, request_id="r", **params):
        params.setdefault("max_tokens", 100)
        inputs = InputProcessor(CONFIG, tokenizer)
        self.prepared = inputs.process(prompt, SamplingParams(**params), request_id=request_id)
        self.ids = [request.request_id for request in self.prepared.engine_requests]
        self.processor = processor or OutputProcessor(tokenizer)
        self.processor.add(self.prepared)

    def output(self, tokens="", child=0, **fields):
        ids = list(tokens.encode()) if isinstance(tokens, str) else tokens
        return EngineOutput(self.ids[child], ids, **fields)

    def step(self, *outputs):
        return self.processor.process(EngineOutputs(list(outputs), SchedulerStats()))

    def feed(self, tokens="", child=0, **fields):
        """The one request output of a step (None when there is none) and the ids to abort."""
        outputs, abort_ids, _ = self.step(self.output(tokens, child, **fields))
        assert len(outputs) <= 1
        return (outputs[0] if outputs else None), abort_ids


def texts(outputs):
    return [output.outputs[0].text if output else None for output in outputs]


def test_cumulative():
    driver = Driver()
    made = [driver.feed(piece)[0] for piece in ("ab", "", "c")]
    assert texts(made) == ["ab", None, "abc"]
    last, abort_ids = driver.feed("d", finish_reason=FinishReason.LENGTH, num_cached_tokens=4)
    assert (last.request_id, last.prompt, last.prompt_token_ids) == ("r", "prompt", list(b"prompt"))
    completion = last.outputs[0]
    assert (completion.text, completion.token_ids, completion.index) == ("abcd", list(b"abcd"), 0)
    assert (completion.finish_reason, completion.stop_reason) == ("length", None)
    assert last.finished
    assert completion.finished()
    assert not made[0].finished
    assert abort_ids == []
    assert driver.processor.num_open == 0


def test_delta():
    driver = Driver(output_kind=DELTA)
    made = [driver.feed(piece)[0] for piece in ("ab", "c")]
    made.append(driver.feed("", finish_reason=FinishReason.LENGTH)[0])
    assert texts(made) == ["ab", "c", ""]
    assert [output.outputs[0].token_ids for output in made] == [[97, 98], [99], []]
    assert [output.finished for output in made] == [False, False, True]


def test_final_only():
    driver = Driver(output_kind=FINAL_ONLY)
    made = [driver.feed(piece)[0] for piece in ("ab", "c")]
    made.append(driver.feed("d", finish_reason=FinishReason.LENGTH)[0])
    assert texts(made) == [None, None, "abcd"]


@pytest.mark.parametrize("kind", list(RequestOutputKind))
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_stop_string_wherever_the_steps_end(kind, size):
    """Text, ids and abort are the same however many tokens a step brings."""
    driver = Driver(stop=["STOP", "zzz"], output_kind=kind)
    text, tokens, shown, abort_ids = "héllo STOP and more".encode(), [], "", []
    for at in range(0, len(text), size):
        output, aborted = driver.feed(list(text[at : at + size]))
        abort_ids += aborted
        if output is None:
            continue
        completion = output.outputs[0]
        delta = kind is DELTA
        shown = shown + completion.text if delta else completion.text
        tokens = tokens + completion.token_ids if delta else completion.token_ids
        assert "ST" not in shown
    assert shown == "héllo "
    assert bytes(tokens).decode() == "héllo STOP"
    assert (completion.finish_reason, completion.stop_reason, output) == ("stop", "STOP", None)
    assert abort_ids == driver.ids


def test_included_stop_string():
    driver = Driver(stop="STOP", include_stop_str_in_output=True)
    output, abort_ids = driver.feed("ab STOP c")
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("ab STOP", "STOP")
    assert abort_ids == driver.ids


def test_the_core_need_not_abort_what_it_ended_itself():
    driver = Driver(stop="b")
    output, abort_ids = driver.feed("abc", finish_reason=FinishReason.LENGTH)
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", "b")
    assert abort_ids == []


def test_held_text_comes_out_at_the_end():
    driver = Driver(stop="STOP", output_kind=DELTA)
    assert driver.feed("abcS")[0].outputs[0].text == "a"
    assert driver.feed("T", finish_reason=FinishReason.LENGTH)[0].outputs[0].text == "bcST"


def test_min_tokens_disarms_stop_strings():
    driver = Driver(stop="ab", min_tokens=3)
    assert driver.feed("abx")[0].outputs[0].finish_reason is None
    assert driver.feed("yab")[0].outputs[0].text == "abxy"
    driver = Driver(stop="ab", min_tokens=1)
    assert driver.feed("ab")[0].outputs[0].text == ""


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "ab")])
def test_a_stop_token_is_kept_in_ids_only(include, text):
    driver = Driver(stop_token_ids=[98], include_stop_str_in_output=include)
    output, _ = driver.feed("ab", finish_reason=FinishReason.STOP, stop_reason=98)
    completion = output.outputs[0]
    assert (completion.text, completion.token_ids, completion.stop_reason) == (text, [97, 98], 98)


def test_end_of_text():
    driver = Driver(skip_special_tokens=False)
    output, _ = driver.feed([97, TOKENIZER.EOS], finish_reason=FinishReason.STOP)
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("a", None)


def test_an_unfinished_character_ends_as_a_replacement():
    driver = Driver()
    emoji = list("🤗".encode())
    assert driver.feed(emoji[:2])[0].outputs[0].text == ""
    assert driver.feed(emoji[2:3], finish_reason=FinishReason.LENGTH)[0].outputs[0].text == "\ufffd"


def test_without_text():
    for driver in (Driver(detokenize=False), Driver([1, 2], tokenizer=None)):
        output, _ = driver.feed("ab", finish_reason=FinishReason.LENGTH)
        assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", [97, 98])


def entry(*pairs):
    ids = [token_id for token_id, _, _ in pairs]
    return TokenLogprobs(ids, [logprob for _, logprob, _ in pairs], [rank for _, _, rank in pairs])


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA])
def test_logprobs(kind):
    driver = Driver(logprobs=2, output_kind=kind)
    first = entry((97, -3.0, 9), (98, -0.1, 1), (99, -0.2, 2))
    second = entry((98, -0.5, 1), (98, -0.5, 1), (195, -1.0, 2))
    one = driver.feed("a", logprobs=[first])[0].outputs[0]
    two = driver.feed("b", logprobs=[second])[0].outputs[0]
    expected = [
        {97: Logprob(-3.0, 9, "a"), 98: Logprob(-0.1, 1, "b"), 99: Logprob(-0.2, 2, "c")},
        {98: Logprob(-0.5, 1, "b"), 195: Logprob(-1.0, 2, "")},
    ]
    assert one.logprobs == expected[:1]
    assert two.logprobs == (expected if kind is CUMULATIVE else expected[1:])
    assert (one.cumulative_logprob, two.cumulative_logprob) == (-3.0, -3.5)


def test_no_logprobs_unless_asked_for():
    completion = Driver().feed("a")[0].outputs[0]
    assert (completion.logprobs, completion.cumulative_logprob) == (None, None)


def test_logprobs_end_with_the_stop_string():
    driver = Driver(logprobs=0, stop="b")
    entries = [entry((token, -1.0, 1)) for token in b"abc"]
    completion = driver.feed("abc", logprobs=entries)[0].outputs[0]
    assert (len(completion.logprobs), completion.cumulative_logprob) == (2, -2.0)


@pytest.mark.parametrize(("kind", "again"), [(CUMULATIVE, True), (DELTA, False)])
def test_prompt_logprobs_come_in_chunks(kind, again):
    driver = Driver("abc", prompt_logprobs=0, output_kind=kind)
    assert driver.feed(prompt_logprobs=[entry((98, -1.0, 1))])[0] is None
    output, _ = driver.feed("x", prompt_logprobs=[entry((99, -2.0, 3))])
    assert output.prompt_logprobs == [None, {98: Logprob(-1.0, 1, "b")}, {99: Logprob(-2.0, 3, "c")}]
    assert (driver.feed("y")[0].prompt_logprobs is not None) is again


def test_children_end_one_by_one():
    driver = Driver(n=3, seed=1, temperature=1.0)
    outputs, *_ = driver.step(driver.output("a", 2), driver.output("b", 0))
    assert [(c.index, c.text) for c in outputs[0].outputs] == [(0, "b"), (1, ""), (2, "a")]
    ends = [driver.feed("z", child, finish_reason=FinishReason.LENGTH)[0] for child in (1, 2, 0)]
    assert [output.finished for output in ends] == [False, False, True]
    assert [c.text for c in ends[-1].outputs] == ["bz", "z", "az"]
    assert driver.processor.num_open == 0


def test_deltas_of_children():
    driver = Driver(n=2, output_kind=DELTA)
    output, _ = driver.feed("a", 1)
    assert [(c.index, c.text) for c in output.outputs] == [(1, "a")]
    outputs, *_ = driver.step(driver.output("b", 0, finish_reason=FinishReason.LENGTH), driver.output("c", 1))
    assert [(c.index, c.text, c.finish_reason) for c in outputs[0].outputs] == [
        (0, "b", "length"),
        (1, "c", None),
    ]
    output, _ = driver.feed("d", 1, finish_reason=FinishReason.LENGTH)
    assert [(c.index, c.text) for c in output.outputs] == [(1, "d")]
    assert output.finished


def test_final_output_of_children():
    driver = Driver(n=2, output_kind=FINAL_ONLY)
    assert driver.feed("a", 1, finish_reason=FinishReason.LENGTH)[0] is None
    output, _ = driver.feed("b", 0, finish_reason=FinishReason.LENGTH)
    assert [c.text for c in output.outputs] == ["b", "a"]


def test_one_child_stops_the_other_goes_on():
    driver = Driver(n=2, stop="x")
    assert driver.feed("ax", 0)[1] == [driver.ids[0]]
    assert driver.feed("late", 0) == (None, [])
    output, _ = driver.feed("b", 1, finish_reason=FinishReason.LENGTH)
    assert [c.text for c in output.outputs] == ["a", "b"]
    assert output.finished


def test_abort_is_idempotent_and_nothing_follows():
    driver = Driver(n=2)
    driver.feed("a", 0, finish_reason=FinishReason.LENGTH)
    assert driver.processor.keys_of(["unknown", "r"]) == [driver.prepared.key]
    assert driver.processor.forget(["unknown", driver.prepared.key]) == [driver.ids[1]]
    assert driver.processor.forget([driver.prepared.key]) == []
    assert driver.processor.keys_of(["r"]) == []
    assert driver.feed("b", 1) == (None, [])
    assert driver.processor.num_open == 0


def test_end_gives_the_last_output():
    driver = Driver(output_kind=DELTA, stop="STOP")
    driver.feed("abcd")
    (output,), abort_ids, _ = driver.processor.end([driver.prepared.key], FinishReason.TIMEOUT)
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("bcd", "timeout")
    assert (output.finished, abort_ids) == (True, driver.ids)


def test_an_error_of_the_core_ends_that_request():
    driver = Driver()
    other = Driver(processor=driver.processor, request_id="other")
    outputs, abort_ids, _ = driver.step(
        driver.output("", finish_reason=FinishReason.ERROR, error="logits are not numbers"), other.output("a")
    )
    failed, fine = outputs
    assert (failed.finished, failed.outputs[0].finish_reason) == (True, "error")
    assert failed.outputs[0].error == "logits are not numbers"
    assert (fine.finished, fine.outputs[0].text, abort_ids) == (False, "a", [])


def test_a_failing_detokenizer_ends_only_its_request(caplog):
    class Broken(ByteTokenizer):
        def token_bytes(self, token_id, *, first=False):
            if token_id == 66:
                raise ValueError("secret detail")
            return super().token_bytes(token_id, first=first)

    broken = Broken()
    driver = Driver(tokenizer=broken, logprobs=0)
    other = Driver(tokenizer=broken, processor=driver.processor, request_id="other")
    outputs, abort_ids, _ = driver.step(
        driver.output("AB", logprobs=[entry((65, -1.0, 1))]), other.output("A")
    )
    failed, fine = outputs
    assert failed.outputs[0].finish_reason == "error"
    assert "secret" not in failed.outputs[0].error
    assert "secret detail" in caplog.text
    assert abort_ids == driver.ids
    assert (fine.outputs[0].text, fine.finished) == ("A", False)
    assert other.feed("C", finish_reason=FinishReason.LENGTH)[0].outputs[0].text == "AC"
    assert driver.processor.num_open == 0


def test_an_id_in_use_is_refused_when_strict():
    driver = Driver(processor=OutputProcessor(TOKENIZER, strict_ids=True))
    with pytest.raises(RequestError, match="'r' is in use"):
        Driver(processor=driver.processor)
    driver.feed("a", finish_reason=FinishReason.LENGTH)
    Driver(processor=driver.processor)


def test_two_requests_of_one_id_are_kept_apart():
    first = Driver()
    second = Driver(processor=first.processor)
    assert len(first.processor.keys_of(["r"])) == 2
    assert texts([first.feed("a")[0], second.feed("x")[0]]) == ["a", "x"]
    processed = first.processor.end(first.processor.keys_of(["r"]), FinishReason.ABORT)
    assert texts(processed.request_outputs) == ["a", "x"]
    assert processed.abort_ids == first.ids + second.ids
    assert first.processor.keys_of(["r"]) == []


def test_a_receiver_gets_what_nobody_else_gets():
    received = []
    processor = OutputProcessor(TOKENIZER)
    prepared = InputProcessor(CONFIG, TOKENIZER).process("p", SamplingParams(max_tokens=9), request_id="r")
    processor.add(prepared, received.append)
    output = EngineOutput(prepared.key, list(b"ab"), finish_reason=FinishReason.LENGTH)
    assert processor.process(EngineOutputs([output], SchedulerStats())).request_outputs == []
    assert texts(received) == ["ab"]


def test_metrics_and_cached_tokens():
    driver = Driver()
    first = driver.feed("a", num_cached_tokens=3)[0]
    stats = first.metrics
    assert stats.arrival_time <= stats.queued_ts <= stats.first_token_ts == stats.last_token_ts
    last = driver.feed("bc", finish_reason=FinishReason.LENGTH, num_cached_tokens=5)[0]
    assert last.metrics.num_generation_tokens == 3
    assert last.metrics.first_token_ts <= last.metrics.last_token_ts
    assert last.metrics.first_token_latency >= 0
    assert last.num_cached_tokens == 3


def test_added_deltas_are_the_cumulative_output():
    driver = Driver(n=2, output_kind=DELTA, logprobs=0)
    whole = None
    for child, piece, reason in ((0, "ab", None), (1, "x", None), (0, "c", FinishReason.LENGTH)):
        entries = [entry((token, -1.0, 1)) for token in piece.encode()]
        output, _ = driver.feed(piece, child, logprobs=entries, finish_reason=reason)
        if whole is None:
            whole = output
        else:
            whole.add(output, aggregate=True)
    assert [(c.text, c.token_ids, c.finish_reason) for c in whole.outputs] == [
        ("abc", [97, 98, 99], "length"),
        ("x", [120], None),
    ]
    assert len(whole.outputs[0].logprobs) == 3
    whole.add(driver.feed("y", 1)[0], aggregate=False)
    assert whole.outputs[1].text == "y"


def test_a_generation_of_the_widest_search_holds_up_the_loop_for_a_moment():
    """The event loop answers /health between two generations: processor time of 64 beams behind a prompt."""
    params = SamplingParams(n=64, use_beam_search=True, temperature=0, max_tokens=6, logprobs=20)
    inputs = InputProcessor(fake_config(max_model_len=9000), TOKENIZER)
    prepared = inputs.process({"prompt_token_ids": [65] * 8000}, params, request_id="r")
    processor = OutputProcessor(TOKENIZER)
    processor.add(prepared)
    ids = list(range(256))
    entry = TokenLogprobs([0, *ids], [-0.1, *(-0.1 - 0.001 * i for i in ids)], [1, *range(1, 257)])
    requests, took_s, widest = prepared.engine_requests, [], 0
    while requests:
        widest = max(widest, len(requests))
        came = [
            EngineOutput(request.request_id, [0], logprobs=[entry], finish_reason=FinishReason.LENGTH)
            for request in requests
        ]
        began_s = time.thread_time()
        processed = processor.process(EngineOutputs(came, SchedulerStats()))
        took_s.append(time.thread_time() - began_s)
        requests = processed.new_requests
    assert processed.request_outputs[0].finished and widest == 64
    assert max(took_s) < 0.1, took_s
