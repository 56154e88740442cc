"""A reranker, a SPLADE and a ColBERT over HTTP, against transformers; what /metrics tells of them."""

import re
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertForMaskedLM, BertForSequenceClassification, BertModel

from tests.integration.test_embeddings import serve
from tests.parity.test_tiny_classifiers import pair_logits
from tests.parity.test_tiny_retrievers import change_config, ids_of, logits_of, maxsim, states, unit
from tests.tiny_encoders import make_encoder, save

QUERY = "w1 w2 w3"
DOCUMENTS = ["w4 w5", "w8 w7 w6 w30 w31", "w3 w2 w1"]
TOLERANCE = 1e-4


@asynccontextmanager
async def served(folder):
    engine, client = await serve(str(folder), dtype="float32", activations="float32")
    try:
        yield client
    finally:
        await client.aclose()
        await engine.shutdown()


async def asked(client, path, **body):
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def check_order(client, expected):
    """Scores are these, and a reranking has them with the best first."""
    scored = await asked(client, "/score", text_1=QUERY, text_2=DOCUMENTS)
    assert [item["score"] for item in scored["data"]] == pytest.approx(expected, abs=TOLERANCE)
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        ranked = await asked(client, path, query=QUERY, documents=DOCUMENTS)
        assert [item["index"] for item in ranked["results"]] == np.argsort(expected)[::-1].tolist()
        found = [item["relevance_score"] for item in ranked["results"]]
        assert found == pytest.approx(sorted(expected, reverse=True), abs=TOLERANCE)


async def test_a_cross_encoder(tmp_path):
    oracle = make_encoder(BertForSequenceClassification, "BertModel", num_labels=1)
    expected = [float(pair_logits(oracle, QUERY, document).sigmoid()) for document in DOCUMENTS]
    turned = [float(pair_logits(oracle, document, QUERY).sigmoid()) for document in DOCUMENTS]
    assert np.abs(np.array(expected) - turned).max() > 1e-2
    async with served(save(oracle, tmp_path)) as client:
        await check_order(client, expected)
        refused = await client.post("/v1/embeddings", json={"input": QUERY})
        assert refused.status_code == 400 and "Embedding API" in refused.text


async def test_splade(tmp_path):
    oracle = make_encoder(BertForMaskedLM, "BertModel")
    weights = [logits_of(oracle, ids_of(text)).relu().log1p().amax(0) for text in (QUERY, *DOCUMENTS)]
    async with served(save(oracle, tmp_path)) as client:
        answer = await asked(client, "/v1/embeddings", input=[QUERY, *DOCUMENTS])
        found = np.array([item["embedding"] for item in answer["data"]])
        np.testing.assert_allclose(found, torch.stack(weights).numpy(), atol=TOLERANCE)


async def test_colbert(tmp_path):
    oracle = make_encoder(BertModel, "BertModel")
    folder = save(oracle, tmp_path)
    torch.manual_seed(5)
    weight = torch.randn(16, 48) / 7
    save_file(
        load_file(folder / "model.safetensors") | {"linear.weight": weight}, folder / "model.safetensors"
    )
    change_config(folder, architectures=["HF_ColBERT"], colbert_dim=16)
    query, *documents = (unit(states(oracle, ids_of(text)) @ weight.T) for text in (QUERY, *DOCUMENTS))
    async with served(folder) as client:
        await check_order(client, [maxsim(query, document) for document in documents])
        answer = await asked(client, "/pooling", input=QUERY)
        np.testing.assert_allclose(answer["data"][0]["data"], query.numpy(), atol=1e-5)


async def test_requests_are_counted(tmp_path):
    async with served(save(make_encoder(BertModel, "BertModel"), tmp_path)) as client:

        async def value(name):
            page = (await client.get("/metrics")).text
            return sum(
                float(found) for found in re.findall(rf"^vllm:{name}{{[^}}]*}} (\S+)", page, re.MULTILINE)
            )

        assert await value("prompt_tokens_total") == await value("request_success_total") == 0
        answer = await asked(client, "/v1/embeddings", input=DOCUMENTS)
        tokens = sum(len(ids_of(text)) for text in DOCUMENTS)
        assert answer["usage"]["prompt_tokens"] == await value("prompt_tokens_total") == tokens
        assert await value("request_success_total") == await value("e2e_request_latency_seconds_count") == 3
        assert await value("generation_tokens_total") == 0
