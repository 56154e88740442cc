"""The real core is killed and stopped under streams of all kinds: each is what it is without that.

OCTAVO_TEST_ROUNDS=30 makes it many deaths; two are enough to see that all kinds go on.

Runs with --whole alone; tests/integration/test_replay.py has the parts.
"""

import asyncio
import os
import signal

import httpx
import pytest

from octavo import AsyncLLM, EngineArgs, SamplingParams, StructuredOutputsParams
from octavo.config import resolve
from octavo.config.server import ServerConfig
from octavo.frontend.client.restart import RestartPolicy
from octavo.messages.sampling import RequestOutputKind
from octavo.serving.app import make_app
from tests.serving import events_of

ROUNDS = int(os.environ.get("OCTAVO_TEST_ROUNDS", "2"))
MAX_TOKENS = 40 if ROUNDS < 5 else 400
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 60}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PROMPT = "The city of Lisbon lies on the river"
KINDS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9, "top_p": 0.9, "seed": 7},
    "unseeded_penalties": {"temperature": 0.0, "repetition_penalty": 1.4, "presence_penalty": 0.5},
    "json": {"seed": 3, "structured_outputs": StructuredOutputsParams(json=SCHEMA)},
    "regex": {"seed": 4, "structured_outputs": StructuredOutputsParams(regex="[a-z]{9}( [0-9]{2,5}){30,40}")},
    "n": {"n": 3, "temperature": 0.9, "seed": 11},
    "best_of": {"n": 2, "best_of": 3, "temperature": 0.9, "seed": 12},
    "logprobs": {"temperature": 0.8, "seed": 5, "logprobs": 2},
    "prompt_logprobs": {"temperature": 0.8, "seed": 6, "logprobs": 1, "prompt_logprobs": 1},
    "min_tokens_and_stop": {"temperature": 0.8, "seed": 8, "min_tokens": 20, "stop": [" a", "zz"]},
    "cumulative": {"temperature": 0.8, "seed": 9, "output_kind": RequestOutputKind.CUMULATIVE},
    "beams": {"n": 3, "use_beam_search": True, "temperature": 0.0, "max_tokens": 24},
    "repetition": {"temperature": 1.1, "seed": 10, "frequency_penalty": 0.7, "bad_words": [" the"]},
}
TOOL = {"type": "function", "function": {"name": "add_person", "strict": True, "parameters": SCHEMA}}
CHATS = [
    {"tools": [TOOL], "tool_choice": "required", "seed": 1},
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "add_person"}}, "seed": 2},
    {"seed": 3, "temperature": 0.8, "logprobs": True, "stream_options": {"include_usage": True}},
]


@pytest.fixture
async def engine(smollm2_path, monkeypatch):
    monkeypatch.setattr(RestartPolicy, "delay_s", lambda policy: 0.0)
    args = EngineArgs(
        model=str(smollm2_path),
        max_model_len=1024,
        num_gpu_blocks_override=1200,
        max_num_seqs=32,
        stall_timeout=2.0 if ROUNDS < 5 else 6.0,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3},
    )
    engine = AsyncLLM(resolve(args), on_crash="replay")
    await engine.start()
    yield engine
    await engine.shutdown()


async def stream(engine, kind):
    """All that a stream says, piece after piece: tokens, text, logprobs and ends by sequence."""
    params = SamplingParams(
        **{"max_tokens": MAX_TOKENS, "output_kind": RequestOutputKind.DELTA, **KINDS[kind]}
    )
    said, prompt = {}, None
    async for output in engine.generate(PROMPT, params):
        prompt = prompt or output.prompt_logprobs
        for piece in output.outputs:
            ids, text, logprobs, end = said.setdefault(piece.index, ([], [], [], []))
            if params.output_kind is RequestOutputKind.CUMULATIVE:
                assert list(piece.token_ids[: len(ids)]) == ids, "what was said does not change"
                ids.clear(), text.clear()
            ids += piece.token_ids
            text.append(piece.text)
            logprobs += [list(entry) for entry in piece.logprobs or ()]
            end += [piece.finish_reason, piece.stop_reason] if piece.finish_reason else []
    said = {index: (ids, "".join(text), logprobs, end) for index, (ids, text, logprobs, end) in said.items()}
    return said, [list(entry or ()) for entry in prompt or ()]


async def chat(client, body):
    """What the events of a streamed answer say, without ids and times."""
    messages = [{"role": "user", "content": "Add Ana, who is 31. Then tell me all about Lisbon."}]
    answer = await client.post(
        "/v1/chat/completions",
        json={"messages": messages, "max_tokens": MAX_TOKENS, "stream": True, **body},
    )
    assert answer.status_code == 200, answer.text
    events = [event for event in events_of(answer.text) if event != "[DONE]"]
    text, calls, tokens, ends = "", {}, [], []
    assert not any("error" in event for event in events), events
    for choice in (choice for event in events for choice in event["choices"]):
        text += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls") or ():
            entry = calls.setdefault(call["index"], ["", ""])
            entry[0] += call["function"].get("name") or ""
            entry[1] += call["function"].get("arguments") or ""
        tokens += [entry["token"] for entry in (choice.get("logprobs") or {}).get("content") or ()]
        ends += [choice["finish_reason"]] if choice["finish_reason"] else []
    return text, calls, tokens, ends, [event["usage"] for event in events if event.get("usage")]


def all_streams(engine, client):
    return [*(stream(engine, kind) for kind in KINDS), *(chat(client, body) for body in CHATS)]


@pytest.mark.slow
@pytest.mark.timeout(120 + 60 * ROUNDS)
async def test_streams_of_all_kinds(engine):
    transport = httpx.ASGITransport(make_app(engine, ServerConfig()))
    async with httpx.AsyncClient(transport=transport, base_url="http://octavo", timeout=300) as client:
        undisturbed = await asyncio.gather(*all_streams(engine, client))
        await engine.reset_prefix_cache()
        running = asyncio.gather(*all_streams(engine, client))
        num_tokens = engine.metrics.generation_tokens.value
        for number in range(1, ROUNDS + 1):
            while engine.metrics.generation_tokens.value < num_tokens + 60 and not running.done():
                await asyncio.sleep(0.01)
            assert not running.done(), f"all was over before death {number}"
            os.kill(engine.core.client._core.pid, signal.SIGSTOP if number % 2 == 0 else signal.SIGKILL)
            while engine.core.health().num_restarts < number:
                await asyncio.sleep(0.02)
            num_tokens = engine.metrics.generation_tokens.value
        replayed = await running
    for name, expected, found in zip([*KINDS, *range(len(CHATS))], undisturbed, replayed, strict=True):
        assert found == expected, name
    assert engine.core.processor.num_open == 0
