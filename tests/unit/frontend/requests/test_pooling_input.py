"""Texts for pooling models: which become one request, and what each of them is told in the end."""

from dataclasses import replace

import numpy as np
import pytest

from octavo.base.errors import OctavoError
from octavo.config.pooling import PoolingConfig
from octavo.frontend.client.backlog import Backlog
from octavo.frontend.observe.engine_metrics import EngineMetrics
from octavo.frontend.output_processor import OutputProcessor
from octavo.frontend.outputs.pooling_output import data_of
from octavo.frontend.requests.input_processor import InputProcessor
from octavo.frontend.requests.pooling_input import MAX_TEXTS, outputs_of
from octavo.messages.pooling import LateInteractionParams, Pooled, PoolingParams
from octavo.messages.request import EngineOutput, EngineOutputs, FinishReason, SchedulerStats, Text
from tests.fakes import ByteTokenizer, fake_config, options

ENCODER = PoolingConfig(
    architecture="BertModel", tasks=("embed", "token_embed"), is_causal=False, embedding_size=2
)
EMBED = PoolingParams(task="embed")


def prepare(prompts, params=EMBED, wanted=None, pooling=ENCODER, replicas=1):
    config = fake_config(max_model_len=20)
    parallel = replace(config.parallel, data_parallel_size=replicas)
    processor = InputProcessor(replace(config, pooling=pooling, parallel=parallel), ByteTokenizer())
    every = params if isinstance(params, list) else [params] * len(prompts)
    names = [f"name-{place}" for place in range(len(prompts))]
    return processor.process_all(prompts, every, wanted or [options()] * len(prompts), names)


def texts_of(prepared):
    """How many texts each request has."""
    return [len(request.text_ids) or 1 for request in prepared]


def test_neighbours_are_one_request():
    [request] = prepare(["abc", [7, 8], {"prompt": "de", "instruction": "f: "}])
    [asked] = request.engine_requests
    single = [prepare([prompt])[0] for prompt in ("abc", [7, 8], {"prompt": "de", "instruction": "f: "})]
    assert asked.prompt_token_ids == [token for one in single for token in one.prompt_token_ids]
    lengths = [len(one.prompt_token_ids) for one in single]
    leading = single[2].engine_requests[0].spec.num_instruction_tokens
    assert asked.texts == [Text(lengths[0]), Text(lengths[1]), Text(lengths[2], 0, leading)] and leading
    assert [one.engine_requests[0].texts for one in single] == [[], [], []]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [4]),
        ({"params": PoolingParams(task="token_embed")}, [1, 1, 1, 1]),
        ({"params": [EMBED, EMBED, PoolingParams(task="embed", use_activation=False), EMBED]}, [2, 1, 1]),
        ({"wanted": [options(priority=n) for n in (0, 1, 1, 1)]}, [1, 3]),
        ({"prompts": ["a", {"prompt": "b", "cache_salt": "x"}, {"prompt": "c", "cache_salt": "x"}]}, [1, 2]),
        ({"prompts": ["a"] * (2 * MAX_TEXTS + 1)}, [MAX_TEXTS, MAX_TEXTS, 1]),
        ({"pooling": replace(ENCODER, is_causal=True)}, [1, 1, 1, 1]),
    ],
)
def test_what_asks_for_something_else_is_another_request(changes, expected):
    assert texts_of(prepare(**{"prompts": ["a", "b", "c", "d"]} | changes)) == expected


def late(key, mode="score_doc", **others):
    return PoolingParams(late_interaction_params=LateInteractionParams(mode, key), **others)


def test_documents_go_where_their_query_is():
    pooling = replace(ENCODER, tasks=("token_embed", "embed"))
    keys = [f"query {number}" for number in range(20)]
    params = [late(key, mode) for key in keys for mode in ("cache_query", "score_doc")]
    made = prepare(["a"] * 40, params, pooling=pooling, replicas=3)
    places = [one.engine_requests[0].standing.data_parallel_rank for one in made]
    assert places[::2] == places[1::2] and set(places) == {0, 1, 2}
    [asked] = prepare(["a"], late("b"), [options(data_parallel_rank=1)], pooling, 3)
    assert asked.engine_requests[0].standing.data_parallel_rank == 1
    with pytest.raises(OctavoError, match="late_interaction_params is for task token_embed, not embed"):
        prepare(["a"], late("b", task="embed"), pooling=pooling)


def test_one_text_that_is_wrong_refuses_all():
    with pytest.raises(OctavoError, match="maximum context length is 20 tokens"):
        prepare(["fine", "x" * 21])


def vectors(*rows, **errors):
    return Pooled(np.array(rows, np.float32).tobytes(), [len(rows), 2], **errors)


def run(*messages):
    """What the texts of a list are told, and the metrics."""
    metrics = EngineMetrics()
    processor = OutputProcessor(None, metrics)
    prepared = prepare(["a", "bc", "d"])
    processor.add(prepared[0])
    made = []
    for message in messages:
        for output in message:
            output.request_id = prepared[0].key
        made += processor.process(EngineOutputs(message, SchedulerStats())).request_outputs
    assert not processor.has_unfinished_requests()
    return outputs_of(prepared, made), metrics


def test_each_text_gets_its_result():
    first = EngineOutput("", [], pooled=vectors([1, 2], [3, 4]))
    last = EngineOutput("", [], pooled=vectors([5, 6]), finish_reason=FinishReason.STOP)
    outputs, metrics = run([first], [last])
    assert [data_of(output).tolist() for output in outputs] == [[1, 2], [3, 4], [5, 6]]
    assert [output.request_id for output in outputs] == ["name-0", "name-1", "name-2"]
    assert [output.prompt_token_ids for output in outputs] == [
        request.prompt_token_ids for text in ("a", "bc", "d") for request in prepare([text])
    ]
    counted = {metric.name: metric for metric in metrics.snapshot()}
    assert counted["vllm:request_success"].value == 3
    assert (
        counted["vllm:request_prompt_tokens"].count == counted["vllm:time_to_first_token_seconds"].count == 3
    )
    assert counted["vllm:request_prompt_tokens"].sum == counted["vllm:prompt_tokens"].value


def test_a_text_without_a_result_says_why():
    last = vectors([1, 2], [0, 0], [5, 6], errors={1: "not finite"})
    outputs, _ = run([EngineOutput("", [], pooled=last, finish_reason=FinishReason.STOP)])
    assert data_of(outputs[2]).tolist() == [5, 6]
    assert [output.outputs[0].finish_reason for output in outputs] == ["stop", "error", "stop"]
    with pytest.raises(OctavoError, match="not finite"):
        data_of(outputs[1])


def test_an_error_is_that_of_all_texts():
    part = EngineOutput("", [], pooled=vectors([1, 2], [3, 4]))
    outputs, _ = run([part], [EngineOutput.failed("", "broken")])
    assert [output.outputs[0].error for output in outputs] == ["broken"] * 3
    assert [output.pooled for output in outputs] == [None] * 3


def test_another_core_begins_with_the_first_text():
    processor, prepared = OutputProcessor(None), prepare(["a", "bc", "d"])
    processor.add(prepared[0])
    asked = prepared[0].engine_requests[0]
    part = EngineOutput(prepared[0].key, [], pooled=vectors([9, 9]))
    processor.process(EngineOutputs([part], SchedulerStats()))
    [again] = processor.resume([prepared[0].key])
    assert again.texts == asked.texts and again.prompt_token_ids == asked.prompt_token_ids
    every = EngineOutput(
        prepared[0].key, [], pooled=vectors([1, 2], [3, 4], [5, 6]), finish_reason=FinishReason.STOP
    )
    made = processor.process(EngineOutputs([every], SchedulerStats())).request_outputs
    assert [data_of(output).tolist() for output in outputs_of(prepared, made)] == [[1, 2], [3, 4], [5, 6]]


async def test_what_waits_to_be_read_becomes_one():
    backlog = Backlog()
    for row, reason in (([1, 2], None), ([3, 4], None), ([5, 6], FinishReason.STOP)):
        output = EngineOutput("list", [], pooled=vectors(row), finish_reason=reason)
        backlog.put(EngineOutputs([output], SchedulerStats()))
    [output] = (await backlog.get()).outputs
    assert output.pooled == vectors([1, 2], [3, 4], [5, 6]) and output.finish_reason is FinishReason.STOP
