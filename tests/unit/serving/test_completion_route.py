"""/v1/completions over a core without a model: what comes out is computed by `expected_output`."""

import base64
import json
import struct

import httpx
import pytest

from octavo.config.server import ServerConfig
from octavo.serving.middleware.request_log import RequestLog
from tests.fakes import ByteTokenizer, expected_output, fake_request
from tests.serving import MAX_MODEL_LEN, events_of, served

pytestmark = pytest.mark.asyncio(loop_scope="module")
TOKENIZER = ByteTokenizer()


def answer_to(prompt, max_tokens, seed=0):
    """The text and the tokens that the fake model says."""
    ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
    tokens, _, _ = expected_output(fake_request("r", ids, max_tokens, seed=seed), MAX_MODEL_LEN)
    return TOKENIZER.decode(tokens), tokens


async def complete(server, status=200, **body):
    answer = await server.client.post(
        "/v1/completions", json={"prompt": "hello", "max_tokens": 6, "seed": 0, **body}
    )
    assert answer.status_code == status, answer.text
    return answer.json()


def usage(num_prompt, num_output):
    """Without what only some servers and models tell."""
    counts = {"prompt_tokens": num_prompt, "completion_tokens": num_output}
    details = {"prompt_tokens_details": None, "completion_tokens_details": None}
    return {**counts, "total_tokens": num_prompt + num_output, **details}


async def stream(server, **body):
    answer = await server.client.post(
        "/v1/completions", json={"prompt": "hello", "max_tokens": 6, "seed": 0, "stream": True, **body}
    )
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events_of(answer.text)
    assert done == "[DONE]"
    return chunks


async def test_a_completion_has_text_reason_and_usage(server):
    body = await complete(server)
    text, tokens = answer_to("hello", 6)
    [choice] = body["choices"]
    assert choice == {
        "index": 0,
        "text": text,
        "logprobs": None,
        "token_ids": None,
        "prompt_token_ids": None,
        "prompt_logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
    }
    assert body["usage"] == usage(5, 6)
    assert body["object"] == "text_completion" and body["model"] == "fake"
    assert body["id"].startswith("cmpl-") and isinstance(body["created"], int)
    assert len(tokens) == 6


@pytest.mark.parametrize(
    "prompt", ["hello", ["hello", "you"], [104, 105], [[104, 105], [1, 2, 3], [7]]], ids=str
)
async def test_every_form_of_prompt(server, prompt):
    body = await complete(server, prompt=prompt, return_token_ids=True)
    prompts = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    assert [choice["index"] for choice in body["choices"]] == list(range(len(prompts)))
    for choice, one in zip(body["choices"], prompts, strict=True):
        text, tokens = answer_to(one, 6)
        assert (choice["text"], choice["token_ids"]) == (text, tokens)
        assert choice["prompt_token_ids"] == (list(one.encode()) if isinstance(one, str) else one)
    assert body["usage"]["completion_tokens"] == 6 * len(prompts)


async def test_an_empty_list_of_embeddings_is_none(server):
    assert (await complete(server, prompt_embeds=[]))["choices"][0]["text"] == answer_to("hello", 6)[0]
    answer = await complete(server, 400, prompt_embeds=["AAAA"])
    assert answer["error"]["param"] == "prompt_embeds"


async def test_more_prompts_than_seats_take_turns(server):
    prompts = [[1, n] for n in range(30)]
    body = await complete(server, prompt=prompts, max_tokens=2)
    assert [choice["text"] for choice in body["choices"]] == [answer_to(ids, 2)[0] for ids in prompts]
    assert server.engine.admission.num_sequences == 0


async def test_n_choices_have_seeds_in_a_row(server):
    body = await complete(server, prompt=["ab", "cd"], n=3, seed=5)
    assert [(c["index"], c["text"]) for c in body["choices"]] == [
        (3 * p + i, answer_to(prompt, 6, seed=5 + i)[0])
        for p, prompt in enumerate(("ab", "cd"))
        for i in range(3)
    ]
    assert body["usage"] == usage(4, 36)


async def test_streamed_text_is_the_whole_text(server):
    whole = await complete(server, prompt=["ab", "cd"], n=2, max_tokens=20)
    chunks = await stream(server, prompt=["ab", "cd"], n=2, max_tokens=20)
    for choice in whole["choices"]:
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["length"]
        assert parts[-1]["finish_reason"] == "length"
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


async def test_usage_of_streams(server):
    chunks = await stream(server, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == usage(5, 6)
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await stream(server, stream_options=options, max_tokens=250)  # too many for one chunk
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 250 and 0 < counts[0] < 250


async def test_echo_and_scoring(server):
    text, _ = answer_to("hello", 2)
    assert (await complete(server, echo=True, max_tokens=2))["choices"][0]["text"] == "hello" + text
    chunks = await stream(server, echo=True, max_tokens=2)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hello" + text
    scored = await complete(server, echo=True, max_tokens=0, logprobs=1)
    [choice] = scored["choices"]
    assert choice["text"] == "hello" and choice["finish_reason"] == "length"
    assert scored["usage"] == usage(5, 0)
    logprobs = choice["logprobs"]
    # The fake's logprob of the token at position p is -p; the first token has none.
    assert logprobs["tokens"] == list("hello")
    assert logprobs["token_logprobs"] == [None, -1.0, -2.0, -3.0, -4.0]
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4]
    assert logprobs["top_logprobs"] == [None, *({char: -p} for p, char in enumerate("hello") if p)]


async def test_echoed_logprobs_go_on_into_the_output(server):
    [choice] = (await complete(server, prompt=[97, 98], echo=True, max_tokens=1, logprobs=1))["choices"]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -2.0]
    assert choice["logprobs"]["tokens"][:2] == ["a", "b"]
    chunks = await stream(server, prompt=[97, 98], echo=True, max_tokens=3, logprobs=1)
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [p for part in parts for p in part["token_logprobs"]] == [None, -1.0, -2.0, -3.0, -4.0]
    offsets = [offset for part in parts for offset in part["text_offset"]]
    tokens = [token for part in parts for token in part["tokens"]]
    assert offsets == [sum(map(len, tokens[:n])) for n in range(5)]


async def test_names_of_tokens(server):
    [choice] = (await complete(server, logprobs=0, max_tokens=3, return_tokens_as_token_ids=True))["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in answer_to("hello", 3)[1]]


async def test_prompt_logprobs(server):
    [choice] = (await complete(server, prompt_logprobs=0))["choices"]
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    assert rest == [
        {str(ord(char)): {"logprob": -p, "rank": 1, "decoded_token": char}}
        for p, char in enumerate("hello")
        if p
    ]


async def test_stop_strings_and_tokens(server):
    text, tokens = answer_to("hello", 40)
    stop = text[10:12]
    [choice] = (await complete(server, max_tokens=40, stop=[stop]))["choices"]
    assert choice["text"] == text[: text.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    [choice] = (await complete(server, max_tokens=40, stop=stop, include_stop_str_in_output=True))["choices"]
    assert choice["text"] == text[: text.index(stop) + len(stop)]
    [choice] = (await complete(server, max_tokens=40, stop_token_ids=[tokens[3]], return_token_ids=True))[
        "choices"
    ]
    assert choice["stop_reason"] == tokens[3]
    assert choice["token_ids"] == tokens[: tokens.index(tokens[3]) + 1]


async def test_ids_come_from_the_body_the_header_or_nowhere(server):
    assert (await complete(server, request_id="mine"))["id"] == "cmpl-mine"
    body = {"prompt": "hello", "max_tokens": 1}
    transport = httpx.ASGITransport(RequestLog(server.app, ServerConfig()))
    async with httpx.AsyncClient(transport=transport, base_url="http://octavo") as client:
        answer = await client.post("/v1/completions", json=body, headers={"X-Request-Id": "theirs"})
        assert answer.json()["id"] == "cmpl-theirs"
        answer = await client.post("/v1/completions", json=body, headers={"X-Request-Id": "a" * 200})
        assert len(answer.json()["id"]) < 50


async def test_the_model_recommends_and_the_request_decides(server):
    assert server.engine.input_processor.default_sampling_values() == {}
    assert (await complete(server, max_tokens=None))["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("body", "param", "text"),
    [
        ({"prompt": None}, "prompt", "must be given"),
        ({"prompt": []}, "prompt", "none of them empty"),
        ({"prompt": [[]]}, "prompt", "none of them empty"),
        ({"prompt": [1, "a"]}, "prompt", "list of token ids"),
        ({"prompt": [True]}, "prompt", "list of token ids"),
        ({"prompt": [[1], "a"]}, "prompt", "list of token ids"),
        ({"prompt": [[[1]]]}, "prompt", "list of token ids"),
        ({"prompt": {"text": "x"}}, "prompt", "list of token ids"),
        ({"prompt": ["a"] * 1025}, "prompt", "at most 1024"),
        ({"prompt": [["a"]] * 1025}, "prompt", "at most 1024"),
        ({"prompt": "a" * 300}, "prompt", "maximum context length is 256"),
        ({"prompt": [2**70]}, "prompt_token_ids", "out of vocabulary"),
        ({"prompt": ["a"] * 1024, "n": 100}, "n", "102400 sequences"),
        ({"max_tokens": 0}, "max_tokens", "echo"),
        ({"max_tokens": -1}, "max_tokens", ">= 0"),
        ({"max_tokens": 1.5}, "max_tokens", "got `float`"),
        ({"n": True}, "n", "got `bool`"),
        ({"n": 0}, "n", ">= 1"),
        ({"n": 3, "best_of": 2}, "best_of", "greater than or equal to n"),
        ({"n": 2, "temperature": 0}, "n", "greedy"),
        ({"temperature": "hot"}, "temperature", "Expected a number, got the text 'hot'"),
        ({"temperature": "nan"}, "temperature", "Expected a number"),
        ({"temperature": "2.5"}, "temperature", "<= 2"),
        ({"temperature": ""}, "temperature", "Expected a number"),
        ({"n": "1.5"}, "n", "got `float`"),
        ({"seed": "1" * 5000}, "seed", "Expected a number"),
        ({"temperature": 2.5}, "temperature", "<= 2"),
        ({"seed": 2**63}, "seed", "<="),
        ({"stop": [""]}, "stop", "length >= 1"),
        ({"stop": ["x" * 5000]}, "stop", "length <= 4096"),
        ({"stop": ["a"] * 65}, "stop", "length <= 64"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "at least 0"),
        ({"allowed_token_ids": [5000]}, "allowed_token_ids", "out of vocabulary"),
        ({"logprobs": 21}, "logprobs", "max allowed: 20"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream is true"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options", "unknown field"),
        ({"suffix": "end"}, "suffix", "no tokens to fill in the middle"),
        ({"response_format": {"type": "yaml"}}, "response_format", "type is text, json_object"),
        ({"guided_json": {}, "guided_regex": "a"}, "structured_outputs", "only use one kind"),
        ({"temprature": 1}, "temprature", "Unknown field"),
        ({"request_id": "with space"}, "request_id", "matching regex"),
        ({"repetition_detection": {"max_pattern_size": 2}}, "repetition_detection", "min_count"),
        ({"vllm_xargs": {"a": 10**30}}, "vllm_xargs", "<="),
        ({"truncate_prompt_tokens": 10**9}, "truncate_prompt_tokens", "at most 256"),
        ({"diversity_penalty": 1}, "diversity_penalty", "beam search"),
    ],
    ids=str,
)  # fmt: skip
async def test_what_is_wrong_is_named(server, body, param, text):
    error = (await complete(server, status=400, **body))["error"]
    assert error["type"] == "BadRequestError" and error["code"] == 400
    assert text in error["message"]
    assert error["param"] == param
    assert server.engine.admission.num_sequences == 0


async def test_errors_before_the_first_token_of_a_stream_are_plain(server):
    error = (await complete(server, status=400, stream=True, prompt="a" * 300))["error"]
    assert error["param"] == "prompt"


async def test_fields_without_effect_are_ignored(server):
    plain = (await complete(server))["choices"]
    assert (await complete(server, user="me", metadata={"a": "b"}, store=True, suffix=None))[
        "choices"
    ] == plain


MARKS = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"]


async def test_what_follows_goes_where_the_model_reads_it(server, monkeypatch):
    monkeypatch.setattr(ByteTokenizer, "get_vocab", lambda self: dict.fromkeys(MARKS, 1))
    body = await complete(server, prompt="def f(", suffix="{}", return_token_ids=True)
    prompt = "<fim_prefix>def f(<fim_suffix>{}<fim_middle>"
    assert body["choices"][0]["prompt_token_ids"] == list(prompt.encode())
    error = (await complete(server, status=400, prompt=["a", "b"], suffix="x"))["error"]
    assert error["param"] == "suffix"


async def test_stop_ids_of_request_and_server_both_hold(server, monkeypatch):
    _, tokens = answer_to("hello", 40)
    own = {"stop_token_ids": [tokens[3]]}
    monkeypatch.setattr(server.engine.input_processor, "default_sampling_values", lambda: own)
    for asked in ({}, {"stop_token_ids": [tokens[30]]}):
        [choice] = (await complete(server, max_tokens=40, **asked))["choices"]
        assert choice["stop_reason"] == tokens[3]


async def test_every_chunk_says_the_usage_where_the_operator_wants_it():
    async with served(ServerConfig(enable_force_include_usage=True)) as forced:
        chunks = await stream(forced)
    assert all(chunk["usage"]["prompt_tokens"] == 5 for chunk in chunks)


def safetensors(rows, width, kind="F32", size=None):
    data = struct.pack(f"<{rows * width}f", *range(rows * width))
    entry = {"dtype": kind, "shape": [rows, width], "data_offsets": [0, size or len(data)]}
    header = json.dumps({"prompt_embeds": entry}).encode()
    return base64.b64encode(len(header).to_bytes(8, "little") + header + data).decode()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (safetensors(2, 4), "enable-prompt-embeds"),
        (safetensors(2, 4, size=10**15), "safetensors"),
        (safetensors(2, 4, kind="I64"), "safetensors"),
        ("gASVHAAAAAAAAACMCGJ1aWx0aW5zlIwFcHJpbnSUk5SMA3B3bpSFlFKULg==", "safetensors"),
        ("!", "safetensors"),
        ("", "safetensors"),
    ],
)
async def test_embeddings_are_read_without_trust(server, text, message):
    error = (await complete(server, status=400, prompt="", prompt_embeds=text))["error"]
    assert message in error["message"] and error["param"] == "prompt_embeds"


async def test_a_request_may_take_its_time_and_no_more():
    async with served(step_s=0.05) as slow:
        error = (await complete(slow, status=504, max_tokens=200, timeout=0.2))["error"]
        assert error["type"] == "TimeoutError"
        answer = await slow.client.post(
            "/v1/completions", json={"prompt": "hello", "max_tokens": 200, "timeout": 0.4, "stream": True}
        )
        *chunks, last = events_of(answer.text)
        assert any(chunk["choices"][0]["text"] for chunk in chunks)
        assert last["error"]["code"] == 504


async def test_unknown_fields_may_be_let_through():
    async with served(ServerConfig(strict=False)) as lenient:
        assert (await complete(lenient, foo=1))["choices"]
        assert "got `array`" in (await complete(lenient, status=400, n=[1]))["error"]["message"]


async def test_the_bound_of_one_prompt_and_that_of_one_request():
    """Those of one prompt are there at once, those of many take turns."""
    async with served(max_num_seqs=4, front={"max_num_queued_reqs": 6}) as server:

        async def ask(num_prompts, n):
            body = {"prompt": ["hello"] * num_prompts, "n": n, "max_tokens": 2, "temperature": 1}
            return await server.client.post("/v1/completions", json=body)

        assert len((await ask(1, 10)).json()["choices"]) == 10
        assert len((await ask(5, 10)).json()["choices"]) == 50
        for num_prompts in (1, 5):
            error = (await ask(num_prompts, 11)).json()["error"]
            assert (error["code"], error["param"]) == (400, "n")
            assert (
                "One prompt may have 10 sequences here (max_num_seqs + max_num_queued_reqs)"
                in error["message"]
            )
        error = (await ask(1024, 17)).json()["error"]
        assert "17408 sequences; one request may ask for 16384" in error["message"]


async def test_numbers_may_be_texts(server):
    texts = {"temperature": " 0.7 ", "top_k": "5", "max_tokens": "3", "seed": "-7", "min_p": "1e-2", "n": "2"}
    numbers = {"temperature": 0.7, "top_k": 5, "max_tokens": 3, "seed": -7, "min_p": 0.01, "n": 2}
    told, plain = await complete(server, **texts), await complete(server, **numbers)
    assert told["choices"] == plain["choices"] and len(plain["choices"]) == 2
    whole = await complete(server, **numbers | {"max_tokens": 3.0, "n": 2.0, "top_k": 5.0})
    assert whole["choices"] == plain["choices"]
    assert (await complete(server, status=400, max_tokens=3.5))["error"]["param"] == "max_tokens"
    refused = await complete(server, status=400, stream="1")
    assert "got `str`" in refused["error"]["message"], "only numbers are read so"
