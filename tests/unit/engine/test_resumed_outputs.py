"""A request that comes with outputs goes on behind them, as if it had made them here."""

import msgspec
import pytest

from octavo.messages.request import FinishReason
from octavo.messages.sampling import RepetitionDetectionParams, SamplingParams
from tests.structured import EOS, ByteEngine

PROMPT = list(range(9))
KINDS = {
    "plain": {},
    "minimum": {
        "sampling": SamplingParams(max_tokens=30, min_tokens=12, stop_token_ids=list(range(0, 258, 4)))
    },
    "stop_token": {"sampling": SamplingParams(max_tokens=30, stop_token_ids=list(range(0, 258, 25)))},
    "logprobs": {"sampling": SamplingParams(max_tokens=30, logprobs=0, prompt_logprobs=0)},
    "regex": {"regex": r"\d{3}-[a-f]{2,9}"},
    "json": {"json": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4}},
    "follower": {"leader_id": "gone"},
}


def run(engine, request):
    """(tokens, logprobs, prompt logprobs, why it ended) of what the engine sends."""
    engine.core.add(request)
    outputs = list(engine.outputs())
    assert {output.request_id for output in outputs} == {request.request_id}
    last = outputs[-1]
    return (
        [token for output in outputs for token in output.new_token_ids],
        [entry for output in outputs for entry in output.logprobs or ()],
        [entry for output in outputs for entry in output.prompt_logprobs or ()],
        (last.finish_reason, last.stop_reason, last.ended_by_text),
    )


@pytest.mark.parametrize("options", [{}, {"steps_in_flight": 2, "max_num_batched_tokens": 5}], ids=["1", "2"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_rest_is_the_same(tmp_path, kind, options):
    engine = ByteEngine(tmp_path, **options)
    request = engine.request("r", 30, 5, PROMPT, **KINDS[kind])
    whole, logprobs, prompt_logprobs, end = run(engine, request)
    assert len(whole) > 3
    for count in range(1, len(whole)):
        given = msgspec.structs.replace(request, given_output_ids=whole[:count])
        given = msgspec.msgpack.decode(msgspec.msgpack.encode(given), type=type(request))
        rest, rest_logprobs, scored, rest_end = run(engine, given)
        assert (rest, rest_logprobs, rest_end) == (whole[count:], logprobs[count:], end)
        assert not scored, "they were handed out with the first output"
    assert (len(logprobs), len(prompt_logprobs)) == ((len(whole), 8) if kind == "logprobs" else (0, 0))
    if kind in ("plain", "json", "regex"):
        given = msgspec.structs.replace(request, given_output_ids=[*whole[:2], (whole[2] + 1) % 256])
        assert run(engine, given)[0] != whole[3:], "a wrong token changes what follows"


def test_first_news_say_how_it_began(tmp_path):
    engine = ByteEngine(tmp_path)
    request = engine.request("r", 30, 5, PROMPT)
    whole, *_ = run(engine, request)
    engine.core.add(msgspec.structs.replace(request, given_output_ids=whole[:20]))
    first, *_ = engine.outputs()
    assert first.scheduled_s > 0 and first.num_cached_tokens == len(PROMPT), "more was found: it is no prompt"


def test_repetition_goes_on(tmp_path):
    sampling = SamplingParams(
        max_tokens=30, repetition_detection=RepetitionDetectionParams(max_pattern_size=1, min_count=3)
    )
    engine = ByteEngine(tmp_path)
    form = engine.request("r", 30, 5, PROMPT, regex="a{9}", sampling=sampling, eos=[])
    form = msgspec.structs.replace(form, given_output_ids=[97, 97])
    tokens, _, _, (reason, *_) = run(engine, form)
    assert (tokens, reason) == ([97], FinishReason.REPETITION)


@pytest.mark.parametrize(
    ("given", "params"),
    [([1, 2, EOS], {}), ([1] * 30, {}), (list(b"0"), {"choice": ["0"]}), (list(b"x"), {"choice": ["0"]})],
    ids=["end_of_text", "length", "form", "not_of_the_form"],
)
def test_what_cannot_go_on_ends_with_an_error(tmp_path, given, params):
    engine = ByteEngine(tmp_path)
    request = msgspec.structs.replace(engine.request("r", 30, **params), given_output_ids=given)
    tokens, _, _, (reason, *_) = run(engine, request)
    assert (tokens, reason) == ([], FinishReason.ERROR)
    assert not engine.core.scheduler.has_requests
