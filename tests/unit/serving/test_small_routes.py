"""Models, tokens, plain generation, and what is not there: over a core without a model."""

import dataclasses
from types import SimpleNamespace

import pytest

from octavo.base.errors import UnknownModel
from octavo.config.observability import ObservabilityConfig
from octavo.config.server import ServerConfig
from octavo.serving.engines import Engines
from tests.fakes import ByteTokenizer, fake_config
from tests.serving import MAX_MODEL_LEN, events_of
from tests.unit.serving.test_completion_route import answer_to

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def post(server, path, status=200, **body):
    answer = await server.client.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


async def test_models(server):
    [card] = (await server.client.get("/v1/models")).json()["data"]
    assert card["id"] == "fake" and card["object"] == "model" and card["max_model_len"] == MAX_MODEL_LEN
    assert (await server.client.get("/v1/models/fake")).json() == card
    assert card["input_modalities"] == ["text"] and card["status"] == {"value": "loaded"}
    assert (await server.client.get("/models")).json()["data"] == [card]
    assert card["default_parameters"]["temperature"] == 1.0
    for name in ("other", "..%2f..%2fetc%2fpasswd", "a/b", ""):
        answer = await server.client.get(f"/v1/models/{name}")
        assert answer.status_code == 404
        assert answer.json()["error"]["type"] == "NotFoundError"


async def test_every_name_of_the_model_is_answered():
    observability = ObservabilityConfig(served_model_name=["one", "two"])
    config = dataclasses.replace(fake_config(), observability=observability)
    engines = Engines(
        SimpleNamespace(config=config, metrics=SimpleNamespace(sleep_state="awake")), ServerConfig()
    )
    assert engines.names == ["one", "two"]
    assert [engines.resolve(asked) for asked in (None, "one", "two")] == ["one", "one", "two"]
    with pytest.raises(UnknownModel, match="Served here: one, two"):
        engines.resolve("fake")


async def test_tokens_of_a_text_and_back(server):
    body = await post(server, "/tokenize", prompt="héy", return_token_strs=True)
    ids = list("héy".encode())
    assert body == {
        "count": 4,
        "max_model_len": MAX_MODEL_LEN,
        "tokens": ids,
        "token_strs": ByteTokenizer().convert_ids_to_tokens(ids),
    }
    assert await post(server, "/detokenize", tokens=ids) == {"prompt": "héy"}
    assert await post(server, "/detokenize", tokens=[]) == {"prompt": ""}


async def test_tokens_of_a_conversation(server):
    messages = [{"role": "user", "content": "hi"}]
    body = await post(server, "/tokenize", messages=messages)
    assert bytes(body["tokens"]) == b"user: hi\nassistant:"
    assert body["token_strs"] is None


async def test_tokens_of_a_conversation_with_tools_are_those_of_the_chat(server):
    asked = {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": {"name": "look_up"}}],
    }
    tokens = await post(server, "/tokenize", **asked)
    assert b"look_up" in bytes(tokens["tokens"])
    refused = await post(server, "/v1/chat/completions", 400, **asked)  # tells how long
    assert f"has {tokens['count']} input tokens" in refused["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"prompt": "a" * (2**20 + 1)}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user"}], "chat_template": "x"}, "chat_template"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "1,2"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [256]}, "tokens"),
        ("/detokenize", {"tokens": [2**64]}, "tokens"),
        ("/detokenize", {"tokens": [1] * (2**17 + 1)}, "tokens"),
        ("/generate", {"prompt": ""}, "prompt"),
        ("/generate", {"prompt": ["a", "b"]}, "prompt"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_what_is_wrong_is_named(server, path, body, param):
    error = (await post(server, path, 400, **body))["error"]
    assert error["param"] == param
    assert server.engine.admission.num_sequences == 0


async def test_plain_generation(server):
    text, tokens = answer_to("hello", 4)
    body = await post(server, "/generate", prompt="hello", max_tokens=4, seed=0)
    assert body == {
        "text": ["hello" + text],
        "token_ids": [tokens],
        "finish_reasons": ["length"],
        "num_prompt_tokens": 5,
    }
    for path, fields in (("/generate_stream", {}), ("/generate", {"stream": True})):
        answer = await server.client.post(
            path, json={"prompt": "hello", "max_tokens": 4, "seed": 0, **fields}
        )
        *pieces, done = events_of(answer.text)
        assert done == "[DONE]"
        assert "".join(piece["text"] for piece in pieces) == text
        assert pieces[-1]["finish_reason"] == "length"


@pytest.mark.parametrize(
    "path", ["/v1/embeddings", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/score"]
)
async def test_what_is_not_there_says_so(server, path):
    error = (await post(server, path, 404, model="fake", input=[]))["error"]
    assert path in error["message"]


async def test_paths_and_methods_that_are_not_there(server):
    for method, path, status in (
        ("GET", "/nope", 404),
        ("GET", "/v1/completions", 405),
        ("PUT", "/tokenize", 405),
    ):
        answer = await server.client.request(method, path)
        assert answer.status_code == status
        assert answer.json()["error"]["code"] == status


async def test_what_remote_tokenizers_ask(server):
    told = (await server.client.get("/tokenizer_info")).json()
    tokenizer = server.engine.tokenizer
    assert (told["eos_token"], told["eos_token_id"]) == (tokenizer.eos_token, tokenizer.eos_token_id)
    assert told["vocab_size"] == len(tokenizer) and "chat_template" in told


async def test_invocations_go_by_the_form_of_the_body(server):
    asked = {"max_tokens": 4, "seed": 0}
    chat = await post(server, "/invocations", messages=[{"role": "user", "content": "hi"}], **asked)
    assert chat["choices"][0]["message"]["content"] == answer_to("user: hi\nassistant:", 4)[0]
    text = await post(server, "/invocations", prompt="hello", **asked)
    assert text["choices"][0]["text"] == answer_to("hello", 4)[0]
    assert (await post(server, "/invocations", 400, text="x"))["error"]["param"] == "messages"
    assert "generates text" in (await post(server, "/invocations", 404, input="x"))["error"]["message"]


@pytest.mark.parametrize("path", ["/", "/docs", "/v1/models", "/v1/models/fake", "/version", "/metrics"])
async def test_head_is_there_where_get_is(server, path):
    assert (await server.client.head(path)).status_code == 200
    assert (await server.client.head("/v1/completions")).status_code == 405


async def test_options_tells_the_methods_of_a_route(server):
    answer = await server.client.options("/v1/completions")
    assert (answer.status_code, answer.headers["allow"]) == (204, "POST")
    assert (await server.client.options("/nowhere")).status_code == 404
