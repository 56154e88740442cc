"""The real default model goes on behind outputs that a request brings, as if it had never stopped."""

import msgspec
import pytest

from octavo import EngineArgs, SamplingParams, StructuredOutputsParams
from octavo.config import resolve
from octavo.engine.core import EngineCore
from octavo.engine.executor import make_executor
from octavo.frontend.requests.input_processor import InputProcessor
from octavo.frontend.text.loader import tokenizer_for

pytestmark = pytest.mark.matrix(3)

NUM_TOKENS = 24
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
}
WAYS = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.8, "top_p": 0.9, "seed": 7},
    "penalties": {
        "temperature": 0.8,
        "seed": 7,
        "repetition_penalty": 1.4,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.7,
    },
    "json": {"seed": 3, "structured_outputs": StructuredOutputsParams(json=SCHEMA)},
    "regex": {"seed": 3, "structured_outputs": StructuredOutputsParams(regex="[a-z]{3}( [0-9]{2,5}){1,4}")},
    "bad_words_and_minimum": {"temperature": 0.8, "seed": 7, "bad_words": [" the", " and"], "min_tokens": 20},
    "logprobs": {"temperature": 0.8, "seed": 7, "logprobs": 2, "prompt_logprobs": 1},
}


@pytest.fixture(scope="module")
def engine(smollm2_path):
    """(core, input processor) of one engine."""
    args = EngineArgs(
        model=str(smollm2_path), dtype="float32", max_model_len=256, num_gpu_blocks_override=100
    )
    config = resolve(args)
    core = EngineCore(config, make_executor(config))
    core.start()
    processor = InputProcessor(config, tokenizer_for(config), core_is_here=True)
    yield core, processor
    processor.close()
    core.close()


def run(core, request):
    """(tokens, logprobs, why it ended)"""
    core.add(request)
    outputs = []
    while core.has_work():
        outputs += core.step().outputs
    tokens = [token for output in outputs for token in output.new_token_ids]
    logprobs = [entry for output in outputs for entry in output.logprobs or ()]
    return tokens, logprobs, (outputs[-1].finish_reason, outputs[-1].stop_reason, outputs[-1].ended_by_text)


@pytest.mark.parametrize("way", WAYS)
def test_the_rest_is_the_same(engine, way):
    core, processor = engine
    prepared = processor.process(
        "The city of Lisbon lies on", SamplingParams(max_tokens=NUM_TOKENS, **WAYS[way])
    )
    [request] = prepared.engine_requests
    whole, logprobs, end = run(core, request)
    assert len(whole) > 6
    for count in (1, 5, len(whole) - 1):
        given = msgspec.structs.replace(request, given_output_ids=whole[:count])
        rest, rest_logprobs, rest_end = run(core, given)
        assert (rest, rest_end) == (whole[count:], end)
        assert len(rest_logprobs) == len(logprobs[count:])
        for found, expected in zip(rest_logprobs, logprobs[count:], strict=True):
            assert found.token_ids == expected.token_ids
            assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-3)


def test_a_wrong_token_changes_what_follows(engine):
    core, processor = engine
    [request] = processor.process(
        "The city of Lisbon lies on", SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
    ).engine_requests
    whole, *_ = run(core, request)
    for wrong in (whole[4] + 1, whole[4] + 7):
        given = msgspec.structs.replace(request, given_output_ids=[*whole[:4], wrong])
        assert run(core, given)[0] != whole[5:]
