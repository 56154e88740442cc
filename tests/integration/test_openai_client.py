"""The real `openai` client against a real server with the default model; the offline API is the oracle."""

import asyncio
import itertools
import json
import re

import anthropic
import openai
import pydantic
import pytest
from websockets.sync.client import connect

from octavo import LLM, SamplingParams
from tests.process_fakes import wait_until
from tests.served_process import ServeProcess

MODEL = "smollm2"
QUESTION = [{"role": "user", "content": "Name two colours."}]
GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def server():
    with ServeProcess(program=["-m", "octavo", "serve"]) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def offline():
    """The same model in this process."""
    with LLM() as llm:
        yield llm


def answer_of(llm, **params):
    greedy = SamplingParams(temperature=0, max_tokens=8, **params)
    [output] = llm.chat(QUESTION, greedy, use_tqdm=False)
    return output


def test_models(client):
    [model] = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_chat_says_what_the_offline_api_says(client, offline):
    expected = answer_of(offline)
    answer = client.chat.completions.create(messages=QUESTION, **GREEDY)
    assert answer.choices[0].message.content == expected.outputs[0].text
    assert answer.choices[0].finish_reason == expected.outputs[0].finish_reason
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.completion_tokens == len(expected.outputs[0].token_ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_says_the_same(client, offline):
    chunks = list(
        client.chat.completions.create(
            messages=QUESTION, **GREEDY, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices)
    assert text == answer_of(offline).outputs[0].text
    assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == ["length"]
    assert chunks[-1].usage.completion_tokens == 8


async def test_many_at_once_on_the_asynchronous_client(server, offline):
    expected = answer_of(offline).outputs[0].text
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:

        async def whole():
            answer = await client.chat.completions.create(messages=QUESTION, **GREEDY)
            return answer.choices[0].message.content

        async def streamed():
            stream = await client.chat.completions.create(messages=QUESTION, **GREEDY, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        assert set(await asyncio.gather(*[f() for f in (whole, streamed) * 4])) == {expected}


def test_several_turns(client):
    turns = [
        *QUESTION,
        {"role": "assistant", "content": "Red and blue."},
        {"role": "user", "content": "One more?"},
    ]
    parts = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in turns]
    plain = client.chat.completions.create(messages=turns, **GREEDY)
    assert client.chat.completions.create(messages=parts, **GREEDY).choices == plain.choices


def test_n_and_seeds(client, offline):
    params = SamplingParams(n=3, seed=7, max_tokens=8, temperature=0.8)
    [expected] = offline.generate("Once upon a time", params, use_tqdm=False)
    answer = client.completions.create(
        model=MODEL, prompt="Once upon a time", n=3, seed=7, max_tokens=8, temperature=0.8
    )
    assert [choice.text for choice in answer.choices] == [output.text for output in expected.outputs]
    assert len({choice.text for choice in answer.choices}) > 1


def test_stop(client, offline):
    text = answer_of(offline).outputs[0].text
    word = text.split()[3]
    answer = client.chat.completions.create(messages=QUESTION, **GREEDY, stop=[word])
    assert answer.choices[0].message.content == text[: text.index(word)]
    assert answer.choices[0].finish_reason == "stop"


def test_chat_logprobs(client, offline):
    expected = answer_of(offline, logprobs=3).outputs[0]
    answer = client.chat.completions.create(messages=QUESTION, **GREEDY, logprobs=True, top_logprobs=3)
    entries = answer.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == expected.text
    for entry, token_id, position in zip(entries, expected.token_ids, expected.logprobs, strict=True):
        assert entry.logprob == pytest.approx(position[token_id].logprob, abs=1e-6)
        best = sorted((logprob.logprob for logprob in position.values()), reverse=True)[:3]
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(best, abs=1e-6)
        assert entry.top_logprobs[0].token == entry.token  # greedy


def test_the_token_itself_is_the_first_of_its_alternatives(client):
    answer = client.completions.create(model=MODEL, prompt="Once upon a", echo=True, max_tokens=2, logprobs=2)
    logprobs = answer.choices[0].logprobs
    for token, top in zip(logprobs.tokens[1:], logprobs.top_logprobs[1:], strict=True):
        assert next(iter(top)) == token


def test_logprobs_of_named_tokens(client):
    """They are told whatever number of logprobs is asked for besides, and the chosen token with them."""
    ids = [13, 100, 2000]
    named = {"logprob_token_ids": ids, "return_tokens_as_token_ids": True}
    asked = {"logprobs": True, "top_logprobs": 5, "extra_body": named}
    answer = client.chat.completions.create(messages=QUESTION, **GREEDY, **asked)
    for entry in answer.choices[0].logprobs.content:
        shown = {top.token: top.logprob for top in entry.top_logprobs}
        assert shown.keys() == {entry.token, *(f"token_id:{i}" for i in ids)}
        assert shown[entry.token] == entry.logprob == max(shown.values())
    text = client.completions.create(model=MODEL, prompt="Hi", max_tokens=3, logprobs=1, extra_body=named)
    assert all(f"token_id:{i}" in top for i in ids for top in text.choices[0].logprobs.top_logprobs)
    for fields in ({"use_beam_search": True, "n": 2}, {"echo": True, "max_tokens": 0}):
        with pytest.raises(openai.BadRequestError, match="logprob_token_ids"):
            client.completions.create(model=MODEL, prompt="Hi", extra_body={**named, **fields})


def test_scoring_as_evaluations_do(client, offline):
    """lm-eval's way: context and continuation as ids or as text, echoed with logprobs, many in a request."""
    tokenizer = offline.get_tokenizer()
    pairs = [
        ("The capital of France is", " Paris"),
        ("The capital of France is", " a banana"),
        ("1 2 3", " 4 5"),
    ]
    contexts = [tokenizer.encode(context) for context, _ in pairs]
    wholes = [tokenizer.encode(context + rest) for context, rest in pairs]
    scored = offline.generate(
        [{"prompt_token_ids": ids} for ids in wholes],
        SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1),
        use_tqdm=False,
    )
    texts = [context + rest for context, rest in pairs]
    for prompts, (max_tokens, end) in itertools.product((wholes, texts), ((1, -1), (0, None))):
        answer = client.completions.create(
            model=MODEL,
            prompt=prompts,
            max_tokens=max_tokens,
            temperature=0,
            logprobs=1,
            echo=True,
            seed=1234,
        )
        for choice, context, whole, oracle in zip(answer.choices, contexts, wholes, scored, strict=True):
            shown = choice.logprobs
            loglikelihood = sum(shown.token_logprobs[len(context) : end])
            positions = list(zip(whole, oracle.prompt_logprobs, strict=True))[len(context) :]
            expected = sum(position[token_id].logprob for token_id, position in positions)
            assert loglikelihood == pytest.approx(expected, abs=1e-5)
            is_greedy = all(
                logprob == max(top.values())
                for logprob, top in zip(
                    shown.token_logprobs[len(context) : end],
                    shown.top_logprobs[len(context) : end],
                    strict=True,
                )
            )
            assert is_greedy == all(position[token_id].rank == 1 for token_id, position in positions)
            assert shown.token_logprobs[0] is None and shown.top_logprobs[0] is None


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"temperature": 3}, openai.BadRequestError, "temperature"),
        ({"model": "other"}, openai.NotFoundError, "model"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"extra_body": {"no_such_field": 1}}, openai.BadRequestError, "no_such_field"),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, openai.BadRequestError, "prompt"),
        ({"response_format": {"type": "json_schema"}}, openai.BadRequestError, "response_format"),
    ],
)
def test_errors(client, fields, error, param):
    for streams in (False, True):
        with pytest.raises(error) as caught:
            client.chat.completions.create(**{"messages": QUESTION, **GREEDY, "stream": streams, **fields})
        assert caught.value.param == param
        assert caught.value.body["message"]


def test_a_deadline(client):
    slow = {
        "prompt": "Once",
        "model": MODEL,
        "max_tokens": 4000,
        "extra_body": {"timeout": 0.5, "ignore_eos": True},
    }
    with pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(**slow)
    assert caught.value.status_code == 504
    texts = []
    with pytest.raises(openai.APIError):
        texts.extend(chunk.choices[0].text for chunk in client.completions.create(**slow, stream=True))
    assert texts


def test_leaving_frees_the_engine(server, client):
    stream = client.completions.create(
        model=MODEL, prompt="Once", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    assert wait_until(lambda: server.get("/load").json()["server_load"] == 0, 5)


@pytest.mark.parametrize("form", ["fields", "sampling_params"])
def test_a_websocket(server, offline, form):
    with connect(server.url.replace("http", "ws") + "/v1/chat/completions") as socket:
        params = {name: value for name, value in GREEDY.items() if name != "model"}
        params = params if form == "fields" else {"sampling_params": params}
        socket.send(json.dumps({"model": MODEL, "messages": QUESTION, **params}))
        frames = []
        while not frames or not frames[-1]["choices"][0]["finish_reason"]:
            frames.append(json.loads(socket.recv(timeout=30)))
            assert frames[-1]["object"] == "chat.completion.chunk"
        text = "".join(frame["choices"][0]["delta"].get("content", "") for frame in frames)
        assert text == answer_of(offline).outputs[0].text


class Person(pydantic.BaseModel):
    name: str
    age: int


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer"}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
IN_ROME = [{"role": "user", "content": "What will the weather be in Rome for the next 3 days?"}]


PLACE = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
PERSON = {"type": "object", "properties": {"place": PLACE}, "required": ["place"]}
NAMED = {"type": "function", "function": {"name": "note"}}
NOTE = {"type": "function", "function": {"name": "note", "parameters": PERSON}}


@pytest.mark.parametrize(
    "form",
    [
        {"tools": [NOTE], "tool_choice": NAMED},
        {"tools": [NOTE], "tool_choice": "required", "response_format": {"type": "json_object"}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "note", "schema": PERSON, "strict": True},
            }
        },
    ],
    ids=["named", "required", "strict"],
)
def test_open_schemas_are_closed(client, form):
    """A small model would go on to invent properties, until its tokens are used up."""
    asked = [{"role": "user", "content": "Tom, 43, a tall man, lives in Rome, Italy. Tell me all of it."}]
    answer = client.chat.completions.create(
        model=MODEL, messages=asked, temperature=0, max_tokens=80, parallel_tool_calls=False, **form
    ).choices[0]
    calls = answer.message.tool_calls
    arguments = json.loads(calls[0].function.arguments if calls else answer.message.content)
    assert arguments.keys() == {"place"} and arguments["place"].keys() == {"city"}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_forced_call_streamed_and_not(client, choice):
    asked = {"model": MODEL, "messages": IN_ROME, "temperature": 0, "max_tokens": 64}
    asked |= {"tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False}
    whole = client.chat.completions.create(**asked).choices[0]
    [call] = whole.message.tool_calls
    assert whole.finish_reason == "tool_calls" and whole.message.content is None
    assert call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] in ("Paris", "Rome") and isinstance(arguments["days"], int)
    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert final.message.tool_calls[0].function.arguments == call.function.arguments


def test_the_result_of_a_call_goes_back(client):
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    turns = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Sunny."},
    ]
    answer = client.chat.completions.create(messages=IN_ROME + turns, tools=[WEATHER], **GREEDY)
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_an_answer_in_the_form_of_a_class(client):
    asked = [{"role": "user", "content": "Tom is 7 years old. Who is it, and how old?"}]
    answer = client.chat.completions.parse(
        model=MODEL, messages=asked, response_format=Person, temperature=0, max_tokens=40
    )
    assert isinstance(answer.choices[0].message.parsed, Person)
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("form", "accepts"),
    [
        ({"guided_choice": ["red", "blue"]}, lambda text: text in ("red", "blue")),
        ({"structured_outputs": {"regex": "[0-9]{3}-[a-z]{2}"}}, re.compile("[0-9]{3}-[a-z]{2}").fullmatch),
        ({"structured_outputs": {"grammar": 'root ::= "yes" | "no"'}}, lambda text: text in ("yes", "no")),
        ({"response_format": {"type": "json_object"}}, lambda text: isinstance(json.loads(text), dict)),
    ],
    ids=["choice", "regex", "grammar", "json_object"],
)
def test_forms_of_answers(client, form, accepts):
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=200, extra_body=form
    )
    assert answer.choices[0].finish_reason == "stop"
    assert accepts(answer.choices[0].message.content)


@pytest.mark.parametrize(
    "form",
    [
        {"structured_outputs": {"regex": "("}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        {"structured_outputs": {"grammar": "root ::= missing"}},
    ],
    ids=str,
)
def test_a_form_that_cannot_be_is_refused(client, form):
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(messages=QUESTION, **GREEDY, extra_body=form)


def test_responses_say_the_same(client, offline):
    expected = answer_of(offline).outputs[0].text
    asked = {"model": MODEL, "temperature": 0, "max_output_tokens": 8}
    first = client.responses.create(input=QUESTION[0]["content"], **asked)
    assert first.output_text == expected and first.status == "incomplete"
    with client.responses.stream(input=QUESTION, **asked) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(deltas) == expected and len(deltas) > 1
    turns = [*QUESTION, {"role": "assistant", "content": expected}, {"role": "user", "content": "One more?"}]
    second = client.responses.create(input="One more?", previous_response_id=first.id, **asked)
    chat = client.chat.completions.create(messages=turns, **GREEDY)
    assert second.output_text == chat.choices[0].message.content
    assert second.usage.input_tokens == chat.usage.prompt_tokens

    class Colour(pydantic.BaseModel):
        is_warm: bool
        red: int = pydantic.Field(ge=0, le=255)

    parsed = client.responses.parse(
        input="Describe the colour orange.", text_format=Colour, **{**asked, "max_output_tokens": 60}
    )
    assert isinstance(parsed.output_parsed, Colour)


@pytest.mark.slow
def test_anthropics_client_hears_the_same(server, client, offline):
    expected = answer_of(offline)
    asked = {"model": MODEL, "max_tokens": 8, "extra_body": {"temperature": 0}}
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as other:
        message = other.messages.create(messages=QUESTION, **asked)
        assert message.content[0].text == expected.outputs[0].text
        assert message.stop_reason == "max_tokens"
        assert message.usage.input_tokens == len(expected.prompt_token_ids)
        with other.messages.stream(messages=QUESTION, **asked) as stream:
            assert "".join(stream.text_stream) == expected.outputs[0].text
        tool = {
            "name": "paint",
            "input_schema": {
                "type": "object",
                "properties": {"colour": {"enum": ["red", "blue"]}},
                "required": ["colour"],
                "additionalProperties": False,
            },
        }
        call = other.messages.create(
            messages=QUESTION,
            **{**asked, "max_tokens": 60},
            tools=[tool],
            tool_choice={"type": "tool", "name": "paint"},
        )
        assert call.stop_reason == "tool_use" and call.content[0].input["colour"] in ("red", "blue")
        counted = other.messages.count_tokens(model=MODEL, messages=QUESTION, system="Be brief.")
        turns = [{"role": "system", "content": "Be brief."}, *QUESTION]
        chat = client.chat.completions.create(messages=turns, **GREEDY)
        assert counted.input_tokens == chat.usage.prompt_tokens


def test_a_batch_says_the_same(client, offline):
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}
    line["body"] = {"messages": QUESTION, **GREEDY}
    file = client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    assert wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", 20)
    output_id = client.batches.retrieve(batch.id).output_file_id
    [result] = map(json.loads, client.files.content(output_id).text.splitlines())
    answer = result["response"]["body"]["choices"][0]["message"]["content"]
    assert answer == answer_of(offline).outputs[0].text
