"""Ollama's routes over a core without a model: forms, lines, what is refused."""

import json

import pytest

from tests.serving import MAX_MODEL_LEN

pytestmark = pytest.mark.asyncio(loop_scope="module")
TALK = [{"role": "user", "content": "hi"}]


async def post(server, path, status=200, **body):
    answer = await server.client.post(path, json={"model": "fake", **body})
    assert answer.status_code == status, answer.text
    return answer


async def test_chat_whole_and_in_lines_says_the_same(server):
    options = {"num_predict": 5, "seed": 3, "num_ctx": 2048, "mirostat": 0}
    whole = (await post(server, "/api/chat", messages=TALK, options=options, stream=False)).json()
    assert whole["done"] and whole["done_reason"] == "length" and whole["eval_count"] == 5
    assert whole["prompt_eval_count"] == len(b"user: hi\nassistant:") and whole["total_duration"] > 0
    assert whole["message"]["role"] == "assistant" and whole["created_at"].endswith("Z")
    answer = await post(server, "/api/chat", messages=TALK, options=options)
    assert answer.headers["content-type"] == "application/x-ndjson"
    *pieces, last = map(json.loads, answer.text.splitlines())
    assert "".join(piece["message"]["content"] for piece in pieces) == whole["message"]["content"]
    assert not any(piece["done"] for piece in pieces) and last["done"] and last["eval_count"] == 5


async def test_it_is_the_same_as_openais(server):
    sampled = {"seed": 7, "max_tokens": 6, "temperature": 0.5}
    body = {"messages": TALK, **sampled}
    chat = (await server.client.post("/v1/chat/completions", json=body)).json()
    options = {"seed": 7, "num_predict": 6, "temperature": 0.5}
    own = (await post(server, "/api/chat", messages=TALK, options=options, stream=False)).json()
    assert own["message"]["content"] == chat["choices"][0]["message"]["content"]
    told = (await post(server, "/api/generate", prompt="hi", options=options, stream=False)).json()
    assert told["response"] == own["message"]["content"]
    plain = (await server.client.post("/v1/completions", json={"prompt": "hi", **sampled})).json()
    raw = (await post(server, "/api/generate", prompt="hi", raw=True, options=options, stream=False)).json()
    assert raw["response"] == plain["choices"][0]["text"] != told["response"]


async def test_logprobs(server):
    body = {"messages": TALK, "options": {"num_predict": 3}, "logprobs": True, "top_logprobs": 2}
    whole = (await post(server, "/api/chat", stream=False, **body)).json()
    assert len(whole["logprobs"]) == 3 and whole["logprobs"][0]["top_logprobs"]


async def test_without_a_prompt_the_model_is_loaded(server):
    assert (await post(server, "/api/generate")).json()["done_reason"] == "load"
    assert (await post(server, "/api/chat", keep_alive="10m")).json()["done_reason"] == "load"
    assert (await post(server, "/api/chat", keep_alive=0)).json()["done_reason"] == "unload"


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("/api/chat", {"model": "other", "messages": TALK}, 404, "Served here: fake"),
        (
            "/api/chat",
            {"messages": [{"role": "user", "content": "", "images": ["aa"]}]},
            400,
            "type 'image_url' cannot be used",
        ),
        ("/api/chat", {"messages": TALK, "options": {"temperature": -1}}, 400, "temperature"),
        ("/api/chat", {"messages": TALK, "keep_alive": "soon"}, 400, "keep_alive: 'soon' is"),
        ("/api/chat", {"messages": TALK, "formt": "json"}, 400, "Unknown field 'formt'"),
        ("/api/generate", {"prompt": "x", "images": ["aa"]}, 400, "type 'image_url' cannot be used"),
        ("/api/generate", {"prompt": "x", "images": ["aa"], "raw": True}, 400, "images need a chat template"),
        ("/api/generate", {"prompt": "x", "context": [1]}, 400, "send the conversation to /api/chat"),
        ("/api/generate", {"prompt": "x", "template": "y"}, 400, "--chat-template"),
        ("/api/embed", {"input": "x"}, 404, "generates text"),
        ("/api/show", {"model": "other"}, 404, "Served here: fake"),
        ("/api/pull", {}, 404, "--models-dir"),
    ],
)
async def test_errors_are_texts(server, path, body, status, text):
    error = (await post(server, path, status, **body)).json()["error"]
    assert text in error


async def test_lists(server):
    [tag] = (await server.client.get("/api/tags")).json()["models"]
    [running] = (await server.client.get("/api/ps")).json()["models"]
    assert tag["name"] == running["name"] == "fake" and running["context_length"] == MAX_MODEL_LEN
    shown = (await post(server, "/api/show", model="fake:latest")).json()
    assert "completion" in shown["capabilities"] and shown["modelfile"] == "FROM fake\n"
    assert "version" in (await server.client.get("/api/version")).json()


async def test_a_server_of_one_model_has_nothing_to_load(server):
    for path in ("/models/load", "/models/unload"):
        answer = await post(server, path, 404)
        assert "has one model" in answer.json()["error"]["message"]
    assert (await server.client.get("/models/sse")).status_code == 404


async def test_programs_need_not_say_that_a_body_is_json(server):
    """As `curl -d` of Ollama's own pages; what pages of other sites can send without asking stays refused."""
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    content = json.dumps({"model": "fake", "prompt": "hi", "stream": False, "options": {"num_predict": 2}})
    for path, body in [("/api/generate", content), ("/api/show", '{"model": "fake"}')]:
        for headers in (form, {}, {"Content-Type": "text/plain"}):
            answer = await server.client.post(path, content=body, headers=headers)
            assert answer.status_code == 200, answer.text
        for page in ({"Origin": "http://localhost"}, {"Sec-Fetch-Site": "cross-site"}):
            answer = await server.client.post(path, content=body, headers={**form, **page})
            assert answer.status_code in (403, 415)
    elsewhere = await server.client.post("/v1/completions", content='{"prompt": "hi"}', headers=form)
    assert elsewhere.status_code == 415
