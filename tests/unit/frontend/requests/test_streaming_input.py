"""A prompt that comes in pieces: every turn equals the answer to the whole prompt so far."""

import asyncio
import dataclasses
from itertools import pairwise

import numpy
import pytest

from octavo import AsyncLLM, EngineDead, RequestError, RequestOutputKind, SamplingParams, Unsupported
from octavo.inputs import StreamingInput
from tests.fakes import ByteTokenizer, expected_output, fake_request
from tests.process_fakes import process_config

PARAMS = SamplingParams(max_tokens=4, seed=5, detokenize=False)
DELTAS = SamplingParams(max_tokens=4, seed=5, detokenize=False, output_kind=RequestOutputKind.DELTA)


@pytest.fixture
async def engine(monkeypatch):
    monkeypatch.setattr("octavo.frontend.async_engine.tokenizer_for", lambda config: ByteTokenizer())
    engine = AsyncLLM(process_config())
    yield engine
    await engine.shutdown()


async def stream(*pieces):
    for piece in pieces:
        yield piece if isinstance(piece, StreamingInput) else StreamingInput(piece)


async def collect(generator):
    return [output async for output in generator]


def answer_to(prompt, params=PARAMS):
    request = fake_request("", prompt, params.max_tokens, seed=params.seed, sampling=params)
    return expected_output(request, 64)[0]


def turns_of(outputs):
    """The last output of each turn: the prompt answered, and the answer's tokens."""
    ends = [output for output in outputs if output.outputs[0].finish_reason]
    return [(output.prompt_token_ids, list(output.outputs[0].token_ids)) for output in ends]


async def test_turns_equal_the_answers_to_the_whole_prompts(engine):
    longer = dataclasses.replace(StreamingInput([7]), sampling_params=SamplingParams(max_tokens=6, seed=1))
    outputs = await collect(engine.generate(stream([1, 2, 3], [4, 5], longer), PARAMS, "mine"))
    first = [1, 2, 3]
    second = [*first, *answer_to(first)[:-1], 4, 5]
    third = [*second, *answer_to(second)[:-1], 7]
    last = (third, answer_to(third, longer.sampling_params))
    assert turns_of(outputs) == [(first, answer_to(first)), (second, answer_to(second)), last, last]
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert {output.request_id for output in outputs} == {"mine"}
    assert outputs[-1].num_cached_tokens >= len(second) // 4 * 4  # found in the prefix cache


async def test_deltas_hold_every_token_once(engine):
    outputs = await collect(engine.generate(stream([1, 2], [3]), DELTAS))
    second = [1, 2, *answer_to([1, 2])[:-1], 3]
    joined = [token for output in outputs for token in output.outputs[0].token_ids]
    assert joined == answer_to([1, 2]) + answer_to(second)
    assert outputs[-1].finished
    assert outputs[-1].outputs[0].token_ids == []
    assert outputs[-1].outputs[0].finish_reason == "length"


async def test_a_piece_may_follow_from_the_answer_before_it(engine):
    answers = asyncio.Queue()

    async def dialogue():
        yield StreamingInput([9])
        for _ in range(2):
            yield StreamingInput([(await answers.get())[-1]])

    prompts = []
    async for output in engine.generate(dialogue(), PARAMS):
        if output.outputs[0].finish_reason and not output.finished:
            prompts.append(output.prompt_token_ids)
            answers.put_nowait(output.outputs[0].token_ids)
    assert len(prompts) == 3
    for before, after in pairwise(prompts):
        assert after == [*before, *answer_to(before)]


async def test_texts_begin_once_and_share_a_salt(engine, monkeypatch):
    asked = []
    process = engine.input_processor.process
    monkeypatch.setattr(
        engine.input_processor,
        "process",
        lambda prompt, *a, **k: asked.append(prompt) or process(prompt, *a, **k),
    )
    one = SamplingParams(max_tokens=1, detokenize=False)
    pieces = stream({"prompt": "ab", "cache_salt": "s"}, "c", "")
    await collect(engine.generate(pieces, one, tokenization_kwargs={"add_special_tokens": False}))
    assert [prompt["prompt_token_ids"] for prompt in asked] == [[97, 98], [97, 98, 99], [97, 98, 99]]
    assert {prompt["cache_salt"] for prompt in asked} == {"s"}


async def test_leaving_closes_the_stream_and_frees_the_core(engine):
    closed = []

    async def endless():
        try:
            while True:
                yield StreamingInput([1])
        finally:
            closed.append(True)

    generator = engine.generate(endless(), SamplingParams(max_tokens=40, seed=1, detokenize=False))
    async for _ in generator:
        break
    await generator.aclose()
    assert closed == [True]
    await engine.wait_for_requests_to_drain(5)
    assert engine.admission.num_sequences == 0


async def test_abort_while_it_answers_and_while_it_waits(engine):
    async def slow():
        yield StreamingInput([1])
        await asyncio.sleep(60)
        yield StreamingInput([2])

    outputs = []
    async for output in engine.generate(slow(), PARAMS, "idle"):
        outputs.append(output)
        if output.outputs[0].finish_reason == "length":
            asyncio.get_running_loop().call_later(0.05, asyncio.ensure_future, engine.abort("idle"))
    assert outputs[-1].finished
    assert outputs[-1].outputs[0].finish_reason == "abort"

    long = SamplingParams(max_tokens=50, seed=1, detokenize=False)
    async for output in engine.generate(stream([1], [2]), long, "busy"):
        last = output
        await engine.abort("busy")
    assert last.finished
    assert last.outputs[0].finish_reason == "abort"


async def test_the_end_of_the_engine_reaches_a_waiting_session(engine):
    async def slow():
        yield StreamingInput([1])
        await asyncio.sleep(60)

    with pytest.raises(EngineDead):
        async for output in engine.generate(slow(), PARAMS):
            if output.outputs[0].finish_reason:
                ending = asyncio.ensure_future(engine.shutdown())
    await ending


REFUSED = [
    ([[1]], SamplingParams(n=2), {}, "use n=1"),
    ([[1]], SamplingParams(best_of=2), {}, "without best_of"),
    ([[1]], None, {"tokenization_kwargs": {"truncate_prompt_tokens": 3}}, "cannot be truncated"),
    ([{"prompt_embeds": numpy.zeros((2, 4), numpy.float32)}], None, {}, "not prompt_embeds"),
    ([[]], None, {}, "cannot be empty"),
    ([list(range(70))], None, {}, "has 70 input tokens"),
]


async def test_refusals(engine):
    for pieces, params, options, says in REFUSED:
        with pytest.raises((RequestError, Unsupported), match=says):
            await collect(engine.generate(stream(*pieces), params, **options))
        assert engine.admission.num_sequences == 0


async def test_what_the_stream_raises_ends_the_session(engine):
    async def broken():
        yield StreamingInput([1])
        raise KeyError("the microphone is gone")

    with pytest.raises(KeyError, match="microphone"):
        await collect(engine.generate(broken(), PARAMS))

    async def foreign():
        yield "no piece"

    with pytest.raises(RequestError, match="must yield StreamingInput, got str"):
        await collect(engine.generate(foreign(), PARAMS))
    assert await collect(engine.generate(stream(), PARAMS)) == []


async def test_the_text_of_token_ids_for_the_output(engine):
    for prompt in ([104, 105], {"prompt_token_ids": [104, 105]}):
        outputs = await collect(engine.generate(prompt, PARAMS, prompt_text="hi", kv_hints={"pin": True}))
        assert outputs[-1].prompt == "hi"
    outputs = await collect(
        engine.generate({"prompt_token_ids": [1], "prompt": "own"}, PARAMS, prompt_text="x")
    )
    assert outputs[-1].prompt == "own"
