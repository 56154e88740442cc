"""Classifiers, cross-encoders and causal families as embedders, against transformers in float32."""

import json

import numpy as np
import pytest
import torch
from transformers import (
    BertForSequenceClassification,
    BertForTokenClassification,
    GemmaForSequenceClassification,
    GteForSequenceClassification,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    ModernBertForSequenceClassification,
    ModernBertForTokenClassification,
    MPNetForSequenceClassification,
    NomicBertForSequenceClassification,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    RobertaForSequenceClassification,
)

from octavo import LLM, PoolingParams
from octavo.frontend.requests import scoring
from tests.tiny_encoders import make_encoder, make_tokenizer, save

TOLERANCE = 1e-4
PAIRS = [("w1 w2 w3", "w4 w5"), ("w9", "w8 w7 w6 w30 w31"), ("w1 w2 w3", "w3 w2 w1")]
PROMPTS = [[5, 9, 11], list(range(6, 90)), [7]]


def engine(folder, **options):
    return LLM(str(folder), cpu_threads=1, dtype="float32", activations="float32", **options)


def logits_of(oracle, ids, **inputs):
    with torch.no_grad():
        return oracle(input_ids=torch.tensor([ids]), **inputs).logits[0]


def pair_logits(oracle, first, second):
    encoded = make_tokenizer(oracle.config.vocab_size).encode(first, second)
    return logits_of(oracle, encoded.ids, token_type_ids=torch.tensor([encoded.type_ids]))


@pytest.fixture(scope="module")
def cross(tmp_path_factory):
    oracle = make_encoder(BertForSequenceClassification, "BertModel", num_labels=1)
    return oracle, save(oracle, tmp_path_factory.mktemp("cross"))


def expected_scores(oracle):
    return torch.cat([pair_logits(oracle, *pair) for pair in PAIRS]).sigmoid().numpy()


def scores(folder):
    with engine(folder) as llm:
        firsts, seconds = zip(*PAIRS, strict=True)
        return np.array([out.outputs.score for out in llm.score(firsts, seconds, use_tqdm=False)])


def test_a_cross_encoder(cross):
    np.testing.assert_allclose(scores(cross[1]), expected_scores(cross[0]), atol=TOLERANCE)


def test_one_type_for_both_texts_is_noticed(cross, monkeypatch):
    def without_types(scoring):
        tokenizer = make_tokenizer(131)
        return [{"prompt_token_ids": tokenizer.encode(*pair).ids} for pair in scoring._pairs]

    monkeypatch.setattr(scoring.Scoring, "prompts", property(without_types))
    assert np.abs(scores(cross[1]) - expected_scores(cross[0])).max() > 1e-2


_DECODER = {"num_key_value_heads": 2, "pad_token_id": None}
CLASSIFIERS = {
    BertForSequenceClassification: ("BertModel", {}),
    GteForSequenceClassification: ("GteModel", {}),
    MPNetForSequenceClassification: ("MPNetModel", {}),
    ModernBertForSequenceClassification: ("ModernBertModel", {"classifier_pooling": "mean"}),
    NomicBertForSequenceClassification: ("NomicBertModel", {}),
    RobertaForSequenceClassification: ("RobertaModel", {}),
    LlamaForSequenceClassification: ("BertModel", {"model_type": "llama", **_DECODER}),
    Qwen3ForSequenceClassification: ("BertModel", {"model_type": "qwen3", "head_dim": 16, **_DECODER}),
    GemmaForSequenceClassification: ("BertModel", {"model_type": "gemma", "head_dim": 16, **_DECODER}),
}


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_labels(tmp_path, kind):
    base, changes = CLASSIFIERS[kind]
    changes = changes | {"num_labels": 3, "id2label": {0: "bad", 1: "fair", 2: "good"}}
    oracle = make_encoder(kind, base, **changes)
    folder = save(oracle, tmp_path)
    with engine(folder) as llm:
        found = [out.outputs.probs for out in llm.classify(PROMPTS, use_tqdm=False)]
        bare = llm.classify(PROMPTS[:1], PoolingParams(use_activation=False), use_tqdm=False)
    logits = torch.stack([logits_of(oracle, ids) for ids in PROMPTS])
    np.testing.assert_allclose(found, logits.softmax(-1).numpy(), atol=TOLERANCE)
    np.testing.assert_allclose(bare[0].outputs.probs, logits[0].numpy(), atol=TOLERANCE)


@pytest.mark.parametrize(
    "kind", [BertForTokenClassification, LlamaForTokenClassification, ModernBertForTokenClassification]
)
def test_labels_of_tokens(tmp_path, kind):
    changes = {"num_labels": 4}
    if kind is LlamaForTokenClassification:
        changes |= {"model_type": "llama", "num_key_value_heads": 2, "pad_token_id": None}
    base = "ModernBertModel" if kind is ModernBertForTokenClassification else "BertModel"
    oracle = make_encoder(kind, base, **changes)
    with engine(save(oracle, tmp_path)) as llm:
        outputs = llm.encode(PROMPTS, use_tqdm=False)
    for output, ids in zip(outputs, PROMPTS, strict=True):
        expected = logits_of(oracle, ids).softmax(-1).numpy()
        np.testing.assert_allclose(output.outputs.data, expected, atol=TOLERANCE)


def test_the_steps_of_a_process_reward_model(tmp_path):
    changes = {"model_type": "llama", "num_key_value_heads": 2, "pad_token_id": None, "num_labels": 2}
    oracle = make_encoder(LlamaForTokenClassification, "BertModel", **changes)
    prompt = [8, 9, 20, 30, 9, 31, 9]
    with engine(save(oracle, tmp_path)) as llm:
        [output] = llm.encode([prompt], PoolingParams(step_tag_id=9), use_tqdm=False)
    expected = logits_of(oracle, prompt).softmax(-1).numpy()[[1, 4, 6]]
    np.testing.assert_allclose(output.outputs.data, expected, atol=TOLERANCE)


CAUSAL = {
    LlamaForCausalLM: {"model_type": "llama", "num_key_value_heads": 2, "pad_token_id": None},
    Qwen3ForCausalLM: {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 16},
}


@pytest.mark.parametrize("mode", ["LAST", "MEAN", "CLS"])
@pytest.mark.parametrize("kind", CAUSAL)
def test_a_causal_family_as_an_embedder(tmp_path, kind, mode):
    oracle = make_encoder(kind, "BertModel", **CAUSAL[kind])
    folder = save(oracle, tmp_path)
    expected = []
    for ids in PROMPTS:
        with torch.no_grad():
            states = oracle.model(input_ids=torch.tensor([ids])).last_hidden_state[0]
        pooled = {"LAST": states[-1], "CLS": states[0], "MEAN": states.mean(0)}[mode]
        expected.append(torch.nn.functional.normalize(pooled, dim=-1).numpy())
    options = {"runner": "pooling", "pooler_config": {"pooling_type": mode}}
    with engine(folder, **options) as llm:
        found = [out.outputs.embedding for out in llm.embed(PROMPTS, use_tqdm=False)]
        again = llm.embed(PROMPTS, use_tqdm=False)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert [out.outputs.embedding for out in again] == found
    assert (again[1].num_cached_tokens > 0) == (mode == "LAST")
    with engine(folder, max_num_batched_tokens=24, max_num_seqs=8, **options) as llm:
        assert [out.outputs.embedding for out in llm.embed(PROMPTS, use_tqdm=False)] == found


def test_a_causal_family_without_its_mask(tmp_path):
    oracle = make_encoder(LlamaForCausalLM, "BertModel", **CAUSAL[LlamaForCausalLM])
    folder = save(oracle, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaBidirectionalModel"]}))
    ids = PROMPTS[1]
    nothing = torch.zeros(1, 1, len(ids), len(ids))
    with torch.no_grad():
        states = oracle.model(input_ids=torch.tensor([ids]), attention_mask=nothing).last_hidden_state[0]
    expected = torch.nn.functional.normalize(states.mean(0), dim=-1).numpy()
    with engine(folder, pooler_config={"pooling_type": "MEAN"}) as llm:
        [output] = llm.embed([ids], use_tqdm=False)
    np.testing.assert_allclose(output.outputs.embedding, expected, atol=1e-5)
