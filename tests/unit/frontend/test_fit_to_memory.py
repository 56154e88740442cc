"""max_model_len=-1: what the core finds out at its start is what every front goes by."""

import dataclasses

import pytest

from octavo import AsyncLLM, LLMEngine, PromptTooLong, SamplingParams
from tests.fakes import ByteTokenizer
from tests.process_fakes import process_config

REST = SamplingParams(max_tokens=None, seed=1, detokenize=False)
ROOM = 29
"""Seven blocks of four slots; the last token needs none."""


@pytest.fixture
def config(monkeypatch):
    for module in ("engine", "async_engine"):
        monkeypatch.setattr(f"octavo.frontend.{module}.tokenizer_for", lambda config: ByteTokenizer())
    config = process_config()
    cache = dataclasses.replace(config.cache, num_gpu_blocks_override=8)
    return dataclasses.replace(config, cache=cache, fit_max_model_len=True)


def test_offline(config):
    engine = LLMEngine.from_vllm_config(config)
    assert engine.model_config.max_model_len == engine.config.model.max_model_len == ROOM
    engine.add_request("a", [1] * 20, REST)
    while engine.has_unfinished_requests():
        [*_, output] = engine.step()
    assert (output.finished, output.outputs[0].finish_reason) == (True, "length")
    assert len(output.outputs[0].token_ids) == ROOM - 20
    with pytest.raises(PromptTooLong, match=f"maximum context length is {ROOM} tokens"):
        engine.add_request("b", [1] * ROOM, REST)
    engine.shutdown()


async def test_in_a_process_of_its_own(config):
    engine = AsyncLLM.from_vllm_config(config)
    assert engine.model_config.max_model_len == 64
    outputs = [output async for output in engine.generate([1] * 20, REST)]
    assert engine.model_config.max_model_len == engine.config.model.max_model_len == ROOM
    assert len(outputs[-1].outputs[0].token_ids) == ROOM - 20
    with pytest.raises(PromptTooLong, match=f"maximum context length is {ROOM} tokens"):
        await anext(engine.generate([1] * ROOM, REST))
    await engine.shutdown()
