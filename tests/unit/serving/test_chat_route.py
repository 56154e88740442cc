"""/v1/chat/completions and its batch over a core without a model; the template is ByteTokenizer's."""

import asyncio
from functools import partial

import pytest

from octavo.config.server import ServerConfig
from octavo.frontend.outputs.request_output import RequestSpecDecodeMetrics
from octavo.frontend.text.chat_template import ChatTemplate
from tests.serving import events_of, served
from tests.unit.serving.test_completion_route import answer_to, usage

pytestmark = pytest.mark.asyncio(loop_scope="module")
USER = {"role": "user", "content": "hi"}
WEATHER = {"type": "function", "function": {"name": "get_weather"}}
NAMED = {"type": "function", "function": {"name": "other"}}
PROMPT = "user: hi\nassistant:"


async def chat(server, status=200, path="", **body):
    body = {"messages": [USER], "max_tokens": 6, "seed": 0, **body}
    answer = await server.client.post("/v1/chat/completions" + path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


async def stream(server, **body):
    body = {"messages": [USER], "max_tokens": 6, "seed": 0, "stream": True, **body}
    answer = await server.client.post("/v1/chat/completions", json=body)
    *chunks, done = events_of(answer.text)
    assert done == "[DONE]"
    return chunks


async def test_an_answer(server):
    body = await chat(server)
    [choice] = body["choices"]
    said, silent = {"role": "assistant", "content": answer_to(PROMPT, 6)[0]}, ("refusal", "reasoning")
    absent = dict.fromkeys((*silent, "reasoning_content", "annotations", "audio", "function_call"))
    assert choice["message"] == {**said, "tool_calls": [], **absent}
    assert choice["finish_reason"] == "length" and choice["logprobs"] is None
    assert choice["token_ids"] is None
    for name in ("service_tier", "prompt_logprobs", "prompt_token_ids", "kv_transfer_params"):
        assert body[name] is None
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-")
    assert body["usage"] == usage(len(PROMPT), 6)


async def test_several_turns_and_parts(server):
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c"},
        USER,
    ]
    body = await chat(server, messages=messages, return_token_ids=True, return_prompt_text=True)
    prompt = "system: be brief\nuser: a\nb\nassistant: c\nuser: hi\nassistant:"
    assert body["prompt_text"] == prompt
    assert body["prompt_token_ids"] == list(prompt.encode())
    assert body["choices"][0]["token_ids"] == answer_to(prompt, 6)[1]


async def test_streamed_chunks_make_the_whole_answer(server):
    whole = await chat(server, n=2, max_tokens=20)
    chunks = await stream(server, n=2, max_tokens=20, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    for choice in whole["choices"]:
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert parts[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in part["delta"] for part in parts[1:])
        assert "".join(part["delta"].get("content", "") for part in parts) == choice["message"]["content"]
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]


async def test_usage_of_the_first_chunk(server):
    """It brings the role, and no token yet."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await stream(server, stream_options=options)
    assert chunks[0]["usage"] == usage(len(PROMPT), 0)
    assert chunks[-1]["usage"] == usage(len(PROMPT), 6)


async def test_ids_in_streams(server):
    chunks = await stream(server, return_token_ids=True)
    assert chunks[0]["prompt_token_ids"] == list(PROMPT.encode())
    ids = [i for chunk in chunks for c in chunk["choices"] for i in c["token_ids"] or ()]
    assert ids == answer_to(PROMPT, 6)[1]


async def test_the_context_is_the_limit_when_none_is_given(server):
    body = await chat(server, max_tokens=None)
    assert body["usage"]["total_tokens"] == 256
    assert (await chat(server, max_completion_tokens=3))["usage"]["completion_tokens"] == 3


async def test_logprobs(server):
    [choice] = (await chat(server, logprobs=True, top_logprobs=1, max_tokens=3))["choices"]
    _, tokens = answer_to(PROMPT, 3)
    # The fake's logprob of the token at position p is -p.
    for position, (entry, token) in enumerate(
        zip(choice["logprobs"]["content"], tokens, strict=True), len(PROMPT)
    ):
        assert (entry["bytes"], entry["logprob"]) == ([token], -position)
        assert entry["top_logprobs"] == [{key: entry[key] for key in ("token", "logprob", "bytes")}]
    [choice] = (await chat(server, logprobs=True, max_tokens=3))["choices"]
    assert [entry["top_logprobs"] for entry in choice["logprobs"]["content"]] == [[], [], []]
    chunks = await stream(server, logprobs=True, max_tokens=3)
    parts = [c["logprobs"] for chunk in chunks for c in chunk["choices"] if c["logprobs"]]
    assert [entry for part in parts for entry in part["content"]] == choice["logprobs"]["content"]


async def test_going_on_with_the_last_message(server):
    messages = [USER, {"role": "assistant", "content": "yes"}]
    for flags in ({}, {"add_generation_prompt": False}):
        body = await chat(
            server, messages=messages, continue_final_message=True, return_prompt_text=True, **flags
        )
        assert body["prompt_text"] == "user: hi\nassistant: yes"
    body = await chat(server, messages=messages, continue_final_message=True, echo=True)
    said = body["choices"][0]["message"]["content"]
    assert said == "yes" + answer_to("user: hi\nassistant: yes", 6)[0]
    chunks = await stream(server, messages=messages, continue_final_message=True, echo=True)
    deltas = [c["delta"].get("content", "") for chunk in chunks for c in chunk["choices"]]
    assert "".join(deltas) == said
    assert (await chat(server, echo=True))["choices"][0]["message"]["content"] == answer_to(PROMPT, 6)[0]


async def test_a_batch_answers_each_conversation(server):
    body = await chat(server, path="/batch", messages=[[USER], [{"role": "user", "content": "you"}]])
    texts = [choice["message"]["content"] for choice in body["choices"]]
    assert texts == [answer_to(PROMPT, 6)[0], answer_to("user: you\nassistant:", 6)[0]]
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    for wrong in ({"stream": True}, {"n": 2}, {"messages": [USER]}, {"messages": []}, {"messages": [[]]}):
        await chat(server, 400, "/batch", **({"messages": [[USER]]} | wrong))


async def test_tools_that_may_not_be_called_do_no_harm(server):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert (await chat(server, tools=tools, tool_choice="none"))["choices"] == (await chat(server))["choices"]
    assert (await chat(server, tools=[], tool_choice="auto"))["choices"]


@pytest.mark.parametrize(
    ("body", "param", "text"),
    [
        ({"messages": None}, "messages", "Expected `array`"),
        ({"messages": []}, "messages", "length >= 1"),
        ({"messages": "hi"}, "messages", "Expected `array`"),
        ({"messages": ["hi"]}, "messages", "Expected `object`"),
        ({"messages": [{"content": "hi"}]}, "messages", "role"),
        ({"messages": [{"role": 7, "content": "hi"}]}, "messages", "role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages", "string or a list"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}]}]},
         "messages", "image_url"),
        ({"top_logprobs": 5}, "top_logprobs", "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "logprobs", "max allowed: 20"),
        ({"logprobs": 5}, "logprobs", "got `int`"),
        ({"max_tokens": 0}, "max_tokens", ">= 1"),
        ({"continue_final_message": True, "add_generation_prompt": True},
         "continue_final_message", "exclude"),
        ({"chat_template": "{{ x }}"}, "chat_template", "never comes from a request"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs", "may not set"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "may not set"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs", "Expected `object"),
        ({"tools": [{}]}, "tools", "missing required field `function`"),
        ({"tools": [WEATHER, WEATHER]}, "tools", "Two tools have the name 'get_weather'"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [WEATHER], "tool_choice": NAMED}, "tool_choice", "not among the tools"),
        (
            {"tools": [WEATHER], "tool_choice": "required", "structured_outputs": {"regex": "a"}},
            "tool_choice",
            "cannot both be had",
        ),
        ({"tool_choice": "sometimes"}, "tool_choice", "Invalid enum value"),
        ({"reasoning_effort": "enormous"}, "reasoning_effort", "Invalid enum value"),
        ({"modalities": ["text", "audio"]}, "modalities", "text only"),
        ({"prompt": "hi"}, "prompt", "Unknown field"),
        ({"response_format": {"type": "yaml"}}, "response_format", "type is text, json_object"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "only use one kind"),
    ],
    ids=str,
)  # fmt: skip
async def test_what_is_wrong_is_named(server, body, param, text):
    error = (await chat(server, 400, **body))["error"]
    assert error["type"] == "BadRequestError" and error["code"] == 400
    assert text in error["message"]
    assert error["param"] == param
    assert server.engine.admission.num_sequences == 0


async def test_a_model_that_is_not_served(server):
    error = (await chat(server, 404, model="other"))["error"]
    assert error["type"] == "NotFoundError" and error["param"] == "model"


async def test_what_the_operator_asks_for():
    config = ServerConfig(
        enable_prompt_tokens_details=True,
        enable_per_request_metrics=True,
        enable_force_include_usage=True,
        response_role="bot",
    )
    async with served(config) as server:
        await chat(server)
        body = await chat(server)
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 16  # of 19, in blocks of 4
        assert body["choices"][0]["message"]["role"] == "bot"
        assert body["metrics"]["time_to_first_token_ms"] > 0 and body["metrics"]["mean_itl_ms"] > 0
        assert "mean_itl_ms" not in (await chat(server, max_tokens=1))["metrics"]
        assert (await stream(server))[-1]["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize("wanted", [True, False])
async def test_what_was_guessed_of_each_answer(monkeypatch, wanted):
    told = RequestSpecDecodeMetrics(2, [1, 0, 3], 9)
    monkeypatch.setattr("octavo.frontend.outputs.sequence_output._told", lambda drafts: told)
    async with served(ServerConfig(enable_per_request_metrics=wanted)) as server:
        body = {"prompt": "a", "max_tokens": 3}
        written = (await server.client.post("/v1/completions", json=body)).json()
        chunks = [chunk["choices"][0] for chunk in await stream(server) if chunk["choices"]]
        found = [written["choices"][0], (await chat(server))["choices"][0], chunks[-1]]
    expected = {"num_spec_tokens": 2, "histogram": [1, 0, 3], "num_draft_tokens": 9} if wanted else None
    assert [choice.get("spec_decode_metrics") for choice in found] == [expected] * 3
    assert not any("spec_decode_metrics" in chunk for chunk in chunks[:-1])


async def test_salts_keep_cached_prompts_apart():
    async with served(ServerConfig(enable_prompt_tokens_details=True)) as server:

        async def cached(**body):
            return (await chat(server, **body))["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert [await cached(cache_salt=salt) for salt in ("a", "a", "b", "a")] == [0, 16, 0, 16]
        assert await cached() == 0


async def test_a_full_queue_refuses_at_once():
    async with served(step_s=0.05, max_num_seqs=1, front={"max_num_queued_reqs": 1}) as server:
        body = {"messages": [USER], "n": 2, "max_tokens": 9}
        ask = partial(server.client.post, "/v1/chat/completions")
        first, second = await asyncio.gather(ask(json=body), ask(json=body))
        assert first.status_code == 200
        assert second.status_code == 503
        assert int(second.headers["retry-after"]) >= 1
        assert second.json()["error"]["type"] == "ServiceUnavailableError"
        assert (await chat(server, 400, n=3))["error"]["param"] == "n"
        assert (await chat(server, max_tokens=1))["choices"]


THINKS = "{{ messages[0].content }} {{ enable_thinking }} {{ thinking }} {{ reasoning_effort }}"


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"reasoning_effort": "none"}, "hi False False none"),
        ({"reasoning_effort": "low"}, "hi True True low"),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            "hi False True low",
        ),
        ({}, "hi True  "),
    ],
)
async def test_effort_turns_thinking_on_and_off(fields, prompt):
    """What the request says of the variables itself counts more; what the operator says, less."""
    async with served(ServerConfig(default_chat_template_kwargs={"enable_thinking": True})) as server:
        server.engine.tokenizer._templates["default"] = ChatTemplate(THINKS)
        assert (await chat(server, **fields, return_prompt_text=True))["prompt_text"] == prompt
        effort = fields.get("reasoning_effort")
        body = {"input": "hi", "max_output_tokens": 1, "reasoning": {"effort": effort}}
        body["chat_template_kwargs"] = fields.get("chat_template_kwargs")
        answer = await server.client.post("/v1/responses", json=body)
        assert answer.json()["usage"]["input_tokens"] == len(prompt)


@pytest.mark.parametrize("sent", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize("read", ["reasoning", "reasoning_content"])
async def test_thoughts_of_earlier_turns_have_both_names(sent, read):
    turns = [USER, {"role": "assistant", "content": "Yes.", sent: "Hm."}, USER]
    template = "{% for message in messages %}[{{ message." + read + " }}]{% endfor %}"
    async with served() as server:
        server.engine.tokenizer._templates["default"] = ChatTemplate(template)
        body = await chat(server, messages=turns, return_prompt_text=True)
        assert body["prompt_text"] == "[][Hm.][]"


async def test_tokens_of_reasoning_are_counted():
    async with served(front={"reasoning_parser": "deepseek_r1"}) as server:
        for fields in ({"n": 2}, {"n": 2, "include_reasoning": False}):
            body = await chat(server, **fields)
            thoughts = [choice["message"]["reasoning"] or "" for choice in body["choices"]]
            assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 12}
            assert all(thoughts) is ("include_reasoning" not in fields)
        chunks = await stream(server, stream_options={"include_usage": True})
        assert chunks[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 6}


async def test_variables_of_the_template():
    """What the template reads comes from the request, then from the operator; other names have no effect."""
    template = "{{ messages[0].content }} {{ tone }} {{ mood }}"
    config = ServerConfig(default_chat_template_kwargs={"tone": "low", "mood": "calm"})
    async with served(config) as server:
        server.engine.tokenizer._templates["default"] = ChatTemplate(template)
        asked = {"tone": "high", "namespace": "x", "unread": 1}
        body = await chat(server, chat_template_kwargs=asked, return_prompt_text=True)
        assert body["prompt_text"] == "hi high calm"
