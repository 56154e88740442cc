"""MiniLM as users have it, offline and over HTTP, against transformers' BERT and the rule of its folder.

OCTAVO_EMBEDDED_TEXTS=2000 takes as many texts. Where sentence-transformers is installed, 2,000 are compared
with its vectors.
"""

import asyncio
import base64
import json
import os
import random
from pathlib import Path

import httpx
import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import AutoModel, AutoTokenizer

from octavo import LLM, AsyncLLM, EngineArgs, PoolingParams, RequestError, SamplingParams
from octavo.base.hub import installed
from octavo.cli.main import main
from octavo.config.server import ServerConfig
from octavo.serving.app import make_app
from tests import bad_pooling
from tests.bad_requests import faults, request_of

on_one_loop = pytest.mark.asyncio(loop_scope="module")
TOLERANCE = 1e-5
LONGEST = 256
MOST_SECTIONS = 40
ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = (
    "the cat sat on a warm stone wall and watched", "Der Fluß fließt über große Steine", "été où déjà naïf",
    "быстрая лиса прыгает через реку", "γρήγορη αλεπού πηδάει", "الثعلب السريع يقفز", "שועל מהיר קופץ",
    "तेज लोमड़ी कूदती है", "速い狐が跳ぶ", "快速的狐狸跳过", "빠른 여우가 뛴다", "🦊🌲 สุนัขจิ้งจอก 12,5 %",
)  # fmt: skip


def make_texts(count):
    """Texts of 0 to 600 words in twelve scripts, empty and blank ones too."""
    rng = random.Random(5)
    texts = ["", " ", "\n\t  "]
    while len(texts) < count:
        words = [word for script in rng.sample(SCRIPTS, 2) for word in script.split()]
        length = rng.choice((1, 3, 9, 20, 60, 120, 600) if len(texts) % 20 == 0 else (1, 3, 9, 20, 60))
        texts.append(" ".join(rng.choice(words) for _ in range(length)))
    return texts


TEXTS = make_texts(int(os.environ.get("OCTAVO_EMBEDDED_TEXTS", "80")))


def reference(texts):
    """What the folder's files say, computed with padding by transformers."""
    folder = str(installed("minilm"))
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).float().eval()
    order, rows = sorted(range(len(texts)), key=lambda i: len(texts[i])), []
    with torch.no_grad():
        for start in range(0, len(texts), 8):
            part = [texts[i] for i in order[start : start + 8]]
            inputs = tokenizer(part, padding=True, truncation=True, max_length=LONGEST, return_tensors="pt")
            mask = inputs["attention_mask"].unsqueeze(-1)
            means = (model(**inputs).last_hidden_state * mask).sum(1) / mask.sum(1)
            rows.append(torch.nn.functional.normalize(means, dim=-1))
    return torch.cat(rows)[np.argsort(order)].numpy()


@pytest.fixture(scope="module")
def expected():
    return reference(TEXTS)


def vectors_of(llm, texts):
    """Of texts cut to what the model takes."""
    options = {"tokenization_kwargs": {"truncate_prompt_tokens": -1}}
    return np.array([out.outputs.embedding for out in llm.embed(texts, use_tqdm=False, **options)])


@pytest.fixture(scope="module")
def llm():
    with LLM("minilm", cpu_threads=1) as made:
        yield made


async def serve(model, **options):
    engine = AsyncLLM.from_engine_args(EngineArgs(model=model, cpu_threads=1, **options))
    await engine.start()
    transport = httpx.ASGITransport(make_app(engine, ServerConfig()), raise_app_exceptions=False)
    return engine, httpx.AsyncClient(transport=transport, base_url="http://octavo", timeout=120)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client():
    engine, client = await serve("minilm")
    yield client
    await client.aclose()
    await engine.shutdown()


def decoded(answer, encoding, order):
    if encoding == "bytes":
        return np.frombuffer(answer.content, f"{order}f4").reshape(-1, 384)
    rows = [item["embedding"] for item in answer.json()["data"]]
    if encoding == "base64":
        rows = [np.frombuffer(base64.b64decode(row), f"{order}f4") for row in rows]
    return np.array(rows, np.float32)


async def vectors_over_http(client, texts, seed):
    """Of batches of any size and order, in any form."""
    rng, found = random.Random(seed), np.zeros((len(texts), 384), np.float32)
    left = rng.sample(range(len(texts)), len(texts))

    async def ask(indexes):
        encoding, endianness = rng.choice(["float", "base64", "bytes"]), rng.choice(["little", "big"])
        body = {"input": [texts[i] for i in indexes], "truncate_prompt_tokens": -1}
        body |= {"encoding_format": encoding} | ({} if encoding == "float" else {"endianness": endianness})
        answer = await client.post("/v1/embeddings", json=body)
        assert answer.status_code == 200, answer.text
        found[indexes] = decoded(answer, encoding, ">" if endianness == "big" else "<")

    batches = []
    while left:
        size = rng.randint(1, 30)
        batches.append(left[:size])
        left = left[size:]
    await asyncio.gather(*map(ask, batches))
    return found


@on_one_loop
async def test_over_http_in_any_batch_and_form(client, expected):
    found = await vectors_over_http(client, TEXTS, 1)
    assert np.abs(found - expected).max() <= TOLERANCE
    again = await client.post("/v1/embeddings", json={"input": TEXTS[5], "encoding_format": "bytes"})
    assert again.content == found[5].tobytes()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the other library
@on_one_loop
async def test_equals_sentence_transformers(client):
    library, texts = pytest.importorskip("sentence_transformers"), make_texts(2000)
    model = library.SentenceTransformer(str(installed("minilm")), device="cpu")
    wanted = model.encode(texts, batch_size=16, show_progress_bar=False)
    found = await vectors_over_http(client, texts, 1)
    assert np.abs(found - wanted).max() <= TOLERANCE
    assert np.abs(np.roll(found, 1, 0) - wanted).max() > 1e-2
    assert (await vectors_over_http(client, texts, 2)).tobytes() == found.tobytes()


def test_offline(llm, expected):
    kwargs = {"truncate_prompt_tokens": -1, "truncation_side": "right"}
    outputs = llm.embed(TEXTS, use_tqdm=False, tokenization_kwargs=kwargs)
    assert np.abs(np.array([out.outputs.embedding for out in outputs]) - expected).max() <= TOLERANCE
    assert outputs[0].outputs.hidden_size == 384
    assert max(len(out.prompt_token_ids) for out in outputs) == LONGEST


def test_headings_find_their_paragraphs(llm):
    pairs = [("How plants make food", "Leaves turn light, water and air into sugar."),
             ("Trains in the mountains", "The railway climbs to the pass through eleven tunnels."),
             ("Bread", "Flour, water, salt and yeast rest overnight and are baked hot.")]  # fmt: skip
    for number, (heading, _) in enumerate(pairs):
        scores = [
            out.outputs.score for out in llm.score(heading, [text for _, text in pairs], use_tqdm=False)
        ]
        assert int(np.argmax(scores)) == number


def test_scores_are_cosines(llm):
    first, second = llm.embed(["a cat", "a dog"], use_tqdm=False)
    [scored] = llm.score("a cat", "a dog", use_tqdm=False)
    cosine = np.dot(first.outputs.embedding, second.outputs.embedding)
    assert scored.outputs.score == pytest.approx(cosine, abs=1e-6)


@pytest.mark.parametrize("asked", [(["a", "b"], ["c", "d", "e"]), ([], ["a"]), ("a", [])])
def test_lengths_that_do_not_pair(llm, asked):
    with pytest.raises(RequestError):
        llm.score(*asked)


def test_what_the_model_cannot(llm):
    with pytest.raises(RequestError, match="matryoshka"):
        llm.embed("a", PoolingParams(dimensions=8))
    with pytest.raises(RequestError, match="Classification API is not supported"):
        llm.classify("a")
    with pytest.raises(RequestError, match="does not generate text"):
        llm.generate("a", SamplingParams())
    with pytest.raises(RequestError, match="does not generate text"):
        llm.chat([{"role": "user", "content": "a"}])
    with pytest.raises(RequestError, match="'score' was removed; use 'classify' instead"):
        llm.encode("a", pooling_task="score")
    with pytest.raises(RequestError, match="maximum context length is 256"):
        llm.embed("word " * 400)


def test_use_activation_false_gives_the_mean_itself(llm):
    [bare] = llm.embed("a cat", PoolingParams(use_activation=False), use_tqdm=False)
    [usual] = llm.embed("a cat", use_tqdm=False)
    norm = np.linalg.norm(bare.outputs.embedding)
    assert abs(norm - 1) > 1e-2
    np.testing.assert_allclose(np.array(bare.outputs.embedding) / norm, usual.outputs.embedding, atol=1e-6)


@on_one_loop
async def test_async_encode(expected):
    engine, client = await serve("minilm")
    outputs = [out async for out in engine.encode(TEXTS[5])]
    assert np.abs(outputs[-1].outputs.data - expected[5]).max() <= TOLERANCE
    await client.aclose()
    await engine.shutdown()


@on_one_loop
async def test_rerank_and_score(client):
    documents = ["Trains run on rails.", "Plants make sugar of light."]
    body = {"query": "What do plants eat?", "documents": documents, "top_n": 1}
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        [best] = (await client.post(path, json=body)).json()["results"]
        assert (best["index"], best["document"]["text"]) == (1, documents[1])
    body = {"text_1": "What do plants eat?", "text_2": documents}
    for path in ("/score", "/v1/score"):
        answer = (await client.post(path, json=body)).json()
        assert answer["data"][1]["score"] == pytest.approx(best["relevance_score"])


@on_one_loop
async def test_documents_and_queries_have_limits_of_their_own(client):
    long, short = "sugar of light is what plants make", "sugar of"
    plain = {"text_1": "What do plants eat", "text_2": short}
    whole = (await client.post("/score", json=plain)).json()["data"][0]["score"]
    asked = {
        "text_1": "What do plants eat?",
        "text_2": long,
        "max_tokens_per_query": 4,
        "max_tokens_per_doc": 2,
    }
    cut = (await client.post("/score", json=asked)).json()
    assert cut["data"][0]["score"] == pytest.approx(whole) and cut["usage"]["prompt_tokens"] == 10
    body = {"query": plain["text_1"], "documents": [long], "max_tokens_per_doc": 2}
    [best] = (await client.post("/rerank", json=body)).json()["results"]
    assert best["relevance_score"] == pytest.approx(whole) and best["document"]["text"] == long


@on_one_loop
async def test_invocations_go_by_the_form_of_the_body(client, expected):
    async def told(**body):
        answer = await client.post("/invocations", json=body)
        return answer.status_code, answer.json()

    status, made = await told(input=TEXTS[5])
    assert status == 200 and np.abs(made["data"][0]["embedding"] - expected[5]).max() <= TOLERANCE
    _, made = await told(input="a cat", task="token_embed")
    assert np.array(made["data"][0]["data"]).shape == (4, 384)
    assert (await told(text_1="a", text_2=["b", "c"]))[1]["data"][1]["object"] == "score"
    assert (await told(query="a", documents=["b", "a"]))[1]["results"][0]["index"] == 1
    for body in ({"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}):
        status, made = await told(**body)
        assert status == 400 and "does not generate text" in made["error"]["message"]


@on_one_loop
async def test_cohere(client, expected):
    body = {"texts": TEXTS[3:5], "embedding_types": ["float", "ubinary", "binary", "base64"]}
    answer = (await client.post("/v2/embed", json=body)).json()
    found = answer["embeddings"]
    assert np.abs(np.array(found["float"]) - expected[3:5]).max() <= TOLERANCE
    assert found["ubinary"][0] == np.packbits(np.array(found["float"][0]) > 0).tolist()
    assert [byte + 128 for byte in found["binary"][0]] == found["ubinary"][0]
    assert answer["meta"]["billed_units"]["input_tokens"] > 0
    inputs = [{"content": [{"type": "text", "text": text}]} for text in TEXTS[3:5]]
    found = (await client.post("/v2/embed", json={"inputs": inputs})).json()["embeddings"]
    assert np.abs(np.array(found["float"]) - expected[3:5]).max() <= TOLERANCE
    cut = (await client.post("/v2/embed", json={"texts": ["word " * 99], "max_tokens": 5})).json()
    assert cut["meta"]["billed_units"]["input_tokens"] == 5


@on_one_loop
async def test_coheres_first_form(client, expected):
    body = {"texts": TEXTS[3:5], "input_type": "search_document", "truncate": "START"}
    answer = (await client.post("/v1/embed", json=body)).json()
    assert np.abs(np.array(answer["embeddings"]) - expected[3:5]).max() <= TOLERANCE
    assert (answer["response_type"], answer["texts"]) == ("embeddings_floats", TEXTS[3:5])
    assert answer["meta"]["api_version"] == {"version": "1"}
    by_type = (await client.post("/v1/embed", json=body | {"embedding_types": ["float", "binary"]})).json()
    assert by_type["response_type"] == "embeddings_by_type" and by_type["meta"] == answer["meta"]
    assert by_type["embeddings"]["float"] == answer["embeddings"]
    assert {*by_type["embeddings"]} == {"float", "binary"}
    long = ["word " * 600 + "the end"]
    ends = [
        (await client.post("/v1/embed", json={"texts": long, "truncate": side})).json()
        for side in ("START", "END", "NONE")
    ]
    assert ends[0]["embeddings"] != ends[1]["embeddings"] and "error" in ends[2]


@on_one_loop
async def test_pooling_gives_a_vector_per_token(client):
    body = {"input": "a cat", "task": "token_embed"}
    [item] = (await client.post("/pooling", json=body)).json()["data"]
    assert np.array(item["data"]).shape == (4, 384)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("bfloat16", torch.bfloat16), ("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)],
)
@on_one_loop
async def test_metadata_of_bytes(client, name, dtype):
    body = {"input": TEXTS[3:6], "encoding_format": "bytes"}
    plain = (await client.post("/v1/embeddings", json=body)).content
    answer = await client.post("/v1/embeddings", json=body | {"embed_dtype": name})
    places = json.loads(answer.headers["metadata"])["data"]
    assert [place["end"] - place["start"] for place in places] == [384 * dtype.itemsize] * 3
    expected = torch.frombuffer(bytearray(plain), dtype=torch.float32).to(dtype)
    assert answer.content == expected.view(torch.uint8).numpy().tobytes()


BAD = [
    ({"input": []}, "input must be"),
    ({}, "Give input or messages"),
    ({"input": ["a"] * 10**5}, "at most"),
    ({"input": [10**6]}, "out of vocabulary"),
    ({"input": "a", "dimensions": 0}, "dimensions must be at least 1"),
    ({"input": "a", "dimensions": -1}, "dimensions must be at least 1"),
    ({"input": "a", "dimensions": 99999}, "matryoshka"),
    ({"input": "a", "encoding_format": "hex"}, "'hex'. Use float, base64, bytes, bytes_only."),
    ({"input": "a", "normalize": False}, "use `use_activation` instead"),
    ({"input": "word " * 2560}, "maximum context length is 256"),
    ({"input": "a", "truncate_prompt_tokens": 257}, "truncate_prompt_tokens"),
    ({"input": "a", "prompt_name": "query"}, "prompt_name"),
    ({"input": "a", "embed_dtype": "float16"}, "embed_dtype"),
    ({"input": ["a", 1]}, "input must be"),
    (
        {"messages": [[{"role": "user", "content": "a"}], {"role": "user", "content": "a"}]},
        "messages must be",
    ),
]


@pytest.mark.parametrize(("body", "says"), BAD, ids=[says for _, says in BAD])
@on_one_loop
async def test_bad_requests_leave_the_engine_alone(client, body, says):
    answer = await client.post("/v1/embeddings", json=body)
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]
    assert (await client.post("/v1/embeddings", json={"input": "a"})).status_code == 200


@on_one_loop
async def test_each_route_refuses_what_is_wrong(client):
    good = {"input": ["a", "b"]}
    before = (await client.post("/v1/embeddings", json=good)).json()["data"]
    found = {}
    for row in bad_pooling.rows():
        answer = await client.send(request_of(client, row))
        if wrong := list(faults(row, answer)):
            found[row.name] = wrong
    assert not found
    assert (await client.post("/v1/embeddings", json=good)).json()["data"] == before


@on_one_loop
async def test_other_servers_routes(client):
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    answer = await client.post("/v1/completions", json={"prompt": "a"})
    assert answer.status_code == 400 and "does not generate text" in answer.text
    for path, body in (
        ("/v1/chat/completions", chat),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {**chat, "max_tokens": 5, "model": "minilm"}),
    ):
        answer = await client.post(path, json=body)
        assert answer.status_code == 400 and "does not generate text" in answer.text, path
    answer = await client.post("/classify", json={"input": "a"})
    assert answer.status_code == 400 and "Classification API is not supported" in answer.text


def test_commands(capsys):
    assert main(["rerank", "What do plants eat?", "Rails.", "Plants eat light."]) == 0
    assert "Plants eat light." in capsys.readouterr().out.splitlines()[0]
    assert main(["embed", "a", "b"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [len(row["embedding"]) for row in rows] == [384, 384]


def sections():
    """Headings of the guides with their pages' titles, and the first paragraph of prose behind each."""
    found = {}
    for page in sorted((ROOT / "docs" / "guides").glob("*.md")):
        title = page.read_text(encoding="utf-8").partition("\n")[0].strip("# ")
        parts = page.read_text(encoding="utf-8").split("\n#")
        for part in parts[1:]:
            heading, _, rest = part.lstrip("#").strip().partition("\n")
            prose = [p.strip() for p in rest.split("\n\n") if p.strip()[:1].isalpha() and len(p.split()) > 12]
            if prose and prose[0] not in found.values():
                found.setdefault(f"{title}: {heading}", prose[0])
    return list(found)[:MOST_SECTIONS], list(found.values())[:MOST_SECTIONS]


def ndcg_at_10(queries, documents):
    """Each query has one right document, of the same number."""
    scores = queries @ documents.T
    ranks = (scores > scores.diagonal()[:, None]).sum(1)
    return float(np.where(ranks < 10, 1 / np.log2(ranks + 2), 0).mean())


def test_headings_of_the_guides_find_their_paragraphs(llm):
    """As well as with transformers' vectors, in four digits; and far better than wrong vectors do."""
    headings, paragraphs = sections()
    assert len(headings) == MOST_SECTIONS
    ours, theirs = vectors_of(llm, headings + paragraphs), reference(headings + paragraphs)
    found, wanted = (ndcg_at_10(v[:MOST_SECTIONS], v[MOST_SECTIONS:]) for v in (ours, theirs))
    assert round(found, 4) == round(wanted, 4)
    assert found > 0.5
    assert ndcg_at_10(ours[:MOST_SECTIONS], ours[MOST_SECTIONS:][::-1]) < 0.2


def test_a_file_of_requests(tmp_path, llm):
    """Lines for several routes of pooling models, without a server."""
    asked = [
        ("/v1/embeddings", {"input": ["a cat", "a dog"]}),
        ("/score", {"data_1": "a cat", "data_2": "a kitten"}),
        ("/v1/rerank", {"query": "a cat", "documents": ["a car", "a kitten"]}),
        ("/v1/embeddings", {"input": "a cat", "encoding_format": "bytes"}),
        ("/v1/completions", {"prompt": "a cat"}),
    ]
    lines = [
        {"custom_id": str(i), "method": "POST", "url": url, "body": body}
        for i, (url, body) in enumerate(asked)
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["run-batch", "--model", "minilm", "-i", str(source), "-o", str(target)]
    assert main([*arguments, "--cpu-threads", "1"]) == 1  # two lines are refused
    results = {r["custom_id"]: r["response"] for r in map(json.loads, target.read_text().splitlines())}
    assert [results[str(i)]["status_code"] for i in range(5)] == [200, 200, 200, 400, 400]
    cat, dog, kitten, car = vectors_of(llm, ["a cat", "a dog", "a kitten", "a car"])
    found = [item["embedding"] for item in results["0"]["body"]["data"]]
    np.testing.assert_allclose(found, [cat, dog], atol=1e-6)
    assert results["1"]["body"]["data"][0]["score"] == pytest.approx(float(cat @ kitten), abs=1e-5)
    ranked = [(r["index"], r["relevance_score"]) for r in results["2"]["body"]["results"]]
    assert ranked == [(1, pytest.approx(cat @ kitten, abs=1e-5)), (0, pytest.approx(cat @ car, abs=1e-5))]
    assert "JSON" in results["3"]["body"]["error"]["message"]


CHUNKED = {"enable_chunked_processing": True, "max_embed_len": 1000}
LONG = [" ".join(SCRIPTS[0].split() * 60), "short", " ".join(SCRIPTS[3].split() * 30)]


def by_the_rule(llm, dimensions=None):
    """The documented mean of pieces, from their own vectors."""
    rows = []
    tokenizer = llm.get_tokenizer()
    for text in LONG:
        ids = tokenizer.encode(text)
        parts = [ids[start : start + LONGEST] for start in range(0, len(ids), LONGEST)]
        outputs = llm.embed(parts, PoolingParams(use_activation=False), use_tqdm=False)
        vectors = np.array([out.outputs.embedding for out in outputs])
        mean = (vectors * [[len(part)] for part in parts]).sum(0) / len(ids)
        rows.append(mean / np.linalg.norm(mean))
    return np.array(rows)


def test_long_texts_in_pieces(llm):
    expected = by_the_rule(llm)
    with LLM("minilm", cpu_threads=1, pooler_config=CHUNKED) as chunked:
        outputs = chunked.embed(LONG, use_tqdm=False, priority=[0, 1, 2])
        with pytest.raises(RequestError, match="maximum embedding input length is 1000 tokens"):
            chunked.embed(" ".join(LONG[0].split() * 4), use_tqdm=False)
    found = np.array([out.outputs.embedding for out in outputs])
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert len(outputs[0].prompt_token_ids) > 2 * LONGEST
    cut = vectors_of(llm, LONG)
    assert np.abs(cut[1] - found[1]).max() < 1e-6 < 1e-2 < np.abs(cut[0] - found[0]).max()
    with pytest.raises(RequestError, match="256"):
        llm.embed(LONG[0], use_tqdm=False)


@on_one_loop
async def test_long_texts_over_http(llm):
    engine, client = await serve("minilm", pooler_config=CHUNKED)
    answer = (await client.post("/v1/embeddings", json={"input": LONG})).json()
    await client.aclose()
    await engine.shutdown()
    found = np.array([item["embedding"] for item in answer["data"]])
    np.testing.assert_allclose(found, by_the_rule(llm), atol=1e-6)
