"""Steps that wait for a front become one, and nothing of them is lost."""

import asyncio
import random

import pytest

from octavo.frontend.client.backlog import Backlog
from octavo.frontend.observe.engine_metrics import EngineMetrics
from octavo.frontend.output_processor import OutputProcessor
from octavo.frontend.requests.input_processor import InputProcessor
from octavo.messages.control import EndRequests
from octavo.messages.request import (
    DraftCounts,
    EngineOutput,
    EngineOutputs,
    FinishReason,
    KVSource,
    RoutedTokens,
    SchedulerStats,
    TokenLogprobs,
)
from octavo.messages.sampling import RequestOutputKind, SamplingParams
from tests.fakes import ByteTokenizer, fake_config

ORDER = EndRequests(0, None, None)


def step(number, *outputs):
    return EngineOutputs(list(outputs), SchedulerStats(num_steps=number))


def taken(*messages):
    """What one reader gets that comes late."""

    async def run():
        backlog = Backlog()
        for message in (*messages, None):
            backlog.put(message)
        return [message async for message in until_none(backlog)]

    return asyncio.run(run())


async def until_none(backlog):
    while (message := await backlog.get()) is not None:
        yield message


def test_steps_become_one():
    scores = [TokenLogprobs([i], [-0.5], [1]) for i in range(3)]
    last = {"finish_reason": FinishReason.STOP, "stop_reason": 9, "ended_by_text": True, "num_preemptions": 2}
    last |= {"drafts": DraftCounts(1, 3, {2: 1}), "source": KVSource("host", 1)}
    [made] = taken(
        step(1, EngineOutput("a", [], prompt_logprobs=scores[:1], num_cached_tokens=3)),
        step(
            2,
            EngineOutput("b", [7]),
            EngineOutput(
                "a", [4], scores[:1], prompt_logprobs=scores[1:], num_cached_tokens=5, scheduled_s=1.5
            ),
        ),
        step(3, EngineOutput("a", [5, 6], scores[1:]), EngineOutput("c", [1])),
        step(4, EngineOutput("a", [9], **last), EngineOutput("b", [8])),
    )
    expected = EngineOutput(
        "a", [4, 5, 6, 9], scores, prompt_logprobs=scores, num_cached_tokens=5, scheduled_s=1.5, **last
    )
    assert made.outputs == [expected, EngineOutput("b", [7, 8]), EngineOutput("c", [1])]
    assert made.stats.num_steps == 4


def test_routes_of_all_steps_are_kept():
    routes = [RoutedTokens(i, bytes([i]), 1, 1, 1) for i in range(3)]
    [made] = taken(
        step(1, EngineOutput("a", [4], routes=routes[:1])), step(2, EngineOutput("a", [5], routes=routes[1:]))
    )
    assert made.outputs == [EngineOutput("a", [4, 5], routes=routes)]


def test_tokens_keep_the_version_of_their_weights():
    """Each of what one reader gets is of one version, in order, and ends once."""
    steps = [("", [1]), ("", [2]), ("new", [3]), ("new", [4]), ("", [5])]
    end = {"finish_reason": FinishReason.LENGTH}
    [made] = taken(
        *(step(i, EngineOutput("a", ids, weight_version=v)) for i, (v, ids) in enumerate(steps)),
        step(9, EngineOutput("b", [7]), EngineOutput("a", [6], **end)),
    )
    told = [(o.weight_version, o.new_token_ids) for o in made.outputs if o.request_id == "a"]
    assert told == [("", [1, 2]), ("new", [3, 4]), ("", [5, 6])]
    assert [o.finish_reason for o in made.outputs if o.request_id == "a"] == [None, None, FinishReason.LENGTH]


def test_orders_keep_their_place():
    made = taken(step(1), ORDER, step(2, EngineOutput("a", [1])), step(3, EngineOutput("a", [2])), ORDER)
    assert made == [step(1), ORDER, step(3, EngineOutput("a", [1, 2])), ORDER]


def test_a_reader_that_comes_and_goes():
    """Whenever it reads, it gets every request's tokens in order."""
    generator = random.Random(1)

    async def run():
        backlog, texts = Backlog(), {}

        async def read():
            async for message in until_none(backlog):
                for output in message.outputs:
                    texts.setdefault(output.request_id, []).extend(output.new_token_ids)
                for _ in range(generator.randrange(4)):
                    await asyncio.sleep(0)

        reader = asyncio.create_task(read())
        for number in range(200):
            backlog.put(step(number, *(EngineOutput(name, [number]) for name in "abc")))
            for _ in range(generator.randrange(3)):
                await asyncio.sleep(0)
        backlog.put(None)
        await reader
        return texts

    assert asyncio.run(run()) == {name: list(range(200)) for name in "abc"}


@pytest.mark.parametrize("params", [{}, {"stop": ["ow"]}, {"n": 2}], ids=["all", "stop_string", "children"])
def test_users_see_the_same(params):
    """Text, ids, logprobs and ends, taken step by step or all at once."""
    text = "hällo wörld, wow".encode()

    def run(join):
        tokenizer, metrics = ByteTokenizer(), EngineMetrics()
        wanted = SamplingParams(max_tokens=99, logprobs=1, output_kind=RequestOutputKind.FINAL_ONLY, **params)
        prepared = InputProcessor(fake_config(max_model_len=1000), tokenizer).process(
            "p", wanted, request_id="r"
        )
        ids = [request.request_id for request in prepared.engine_requests]
        processor = OutputProcessor(tokenizer, metrics)
        processor.add(prepared)

        def output(name, index, token, *, ends):
            end = {"finish_reason": FinishReason.LENGTH} if ends else {}
            scores = [TokenLogprobs([token, 9], [-0.25 * index, -7.0], [1, 2])]
            return EngineOutput(name, [token], scores, num_cached_tokens=0 if index else 1, **end)

        steps = [
            step(index, *(output(name, index, token, ends=index == len(text) - 1) for name in ids))
            for index, token in enumerate(text)
        ]
        made = []
        for message in taken(*steps) if join else steps:
            made += processor.process(message).request_outputs
        assert processor.num_open == 0
        [last] = made
        return last.outputs, last.num_cached_tokens, last.finished

    assert run(join=True) == run(join=False)
