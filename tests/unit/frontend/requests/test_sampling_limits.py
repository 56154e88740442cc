"""What depends on the engine: its vocabulary, its processors, where it computes; streams in larger pieces."""

import pytest

from octavo.base.errors import RequestError, Unsupported
from octavo.frontend.output_processor import OutputProcessor
from octavo.frontend.requests.input_processor import InputProcessor
from octavo.frontend.requests.sampling_limits import SamplingLimits
from octavo.messages.request import EngineOutput, EngineOutputs, FinishReason, SchedulerStats, TokenLogprobs
from octavo.messages.sampling import RequestOutputKind, SamplingParams
from tests.fakes import ByteTokenizer, fake_config

VOCAB = 300


class Picky:
    """A class of the user's, as far as the front knows it."""

    @classmethod
    def validate_params(cls, params):
        if (params.extra_args or {}).get("colour") == "red":
            raise ValueError("colour must not be red")


def resolve(limits=None, **params):
    return (limits or SamplingLimits(VOCAB, 20, None)).resolve(SamplingParams(detokenize=False, **params))


def test_listed_tokens_need_no_permission_but_a_place_in_the_vocabulary():
    ids = list(range(100))
    assert resolve(logprob_token_ids=ids).logprobs == 100
    with pytest.raises(RequestError, match=r"\[300\] in logprob_token_ids are out of vocabulary"):
        resolve(logprob_token_ids=[1, VOCAB])
    with pytest.raises(RequestError, match=r"\[300, 301\] in prompt_logprob_token_ids"):
        resolve(prompt_logprob_token_ids=[[1, 300], [301]])


def test_a_processor_of_the_engine_may_refuse():
    limits = SamplingLimits(VOCAB, 20, None, processors=(Picky,))
    resolve(limits, extra_args={"colour": "blue"})
    with pytest.raises(RequestError, match="colour must not be red"):
        resolve(limits, extra_args={"colour": "red"})


def test_functions_stay_in_their_process():
    with pytest.raises(Unsupported, match=r"AsyncLLM.*its option logits_processors"):
        resolve(logits_processors=[max])
    assert resolve(SamplingLimits(VOCAB, 20, None, takes_functions=True), logits_processors=[max])


def test_the_engines_stream_interval_is_the_least():
    limits = SamplingLimits(VOCAB, 20, None, stream_interval=4)
    intervals = [resolve(limits, stream_interval=asked).stream_interval for asked in (None, 3, 4, 9)]
    assert intervals == [4, 4, 4, 9]


@pytest.mark.parametrize(
    ("start", "ids", "text"),
    [
        (3, [1], "must be less than 3 for a prompt of 4 tokens, got 3."),
        (0, [[1], [2]], "one for each of the 3 scored positions, got 2."),
        (2, [[1], [2]], "one for each of the 1 scored positions, got 2."),
    ],
)
def test_candidates_fit_the_prompt(start, ids, text):
    params = SamplingParams(prompt_logprob_token_ids=ids, prompt_logprob_start=start)
    with pytest.raises(RequestError, match=text):
        InputProcessor(fake_config(), None).process([1, 2, 3, 4], params)


def run(params, steps):
    """What each step of `steps` (EngineOutput fields) shows."""
    prepared = InputProcessor(fake_config(), ByteTokenizer()).process("four", params)
    outputs = OutputProcessor(ByteTokenizer())
    outputs.add(prepared)
    [engine_id] = [request.request_id for request in prepared.engine_requests]
    shown = []
    for fields in steps:
        made = outputs.process(EngineOutputs([EngineOutput(engine_id, **fields)], SchedulerStats()))
        shown.append(made.request_outputs[0] if made.request_outputs else None)
    return shown


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
def test_stream_interval(kind):
    steps = [{"new_token_ids": [letter]} for letter in b"abcdefgh"]
    steps[-1]["finish_reason"] = FinishReason.LENGTH
    shown = run(SamplingParams(stream_interval=3, output_kind=kind), steps)
    pieces = [output.outputs[0].text if output else None for output in shown]
    if kind is RequestOutputKind.DELTA:
        assert pieces == ["a", None, None, "bcd", None, None, "efg", "h"]
    else:
        assert pieces == ["a", None, None, "abcd", None, None, "abcdefg", "abcdefgh"]


def test_candidates_are_kept_apart_from_prompt_logprobs():
    entries = [TokenLogprobs([9], [-1.0], [1]), TokenLogprobs([8, 5, 6], [-2.0, -5.0, -6.0], [1, 0, 0])]
    steps = [
        {"new_token_ids": [], "prompt_logprobs": entries},
        {"new_token_ids": [65], "prompt_logprobs": [TokenLogprobs([7, 4], [-3.0, -4.0], [1, 0])]},
    ]
    asked = {"prompt_logprob_token_ids": [[5, 6], [4]], "prompt_logprob_start": 1}
    output = run(SamplingParams(prompt_logprobs=0, **asked), steps)[-1]
    assert output.prompt_token_id_logprobs == [[-5.0, -6.0], [-4.0]]
    assert [position and list(position) for position in output.prompt_logprobs] == [None, [9], [8], [7]]
