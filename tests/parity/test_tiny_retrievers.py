"""SPLADE, ColBERT, bge-m3 and rerankers that answer with a token, against transformers in float32."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import (
    BertForMaskedLM,
    BertModel,
    DistilBertForMaskedLM,
    DistilBertForSequenceClassification,
    GemmaForCausalLM,
    ModernBertForMaskedLM,
    MPNetForMaskedLM,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    RobertaForMaskedLM,
    XLMRobertaModel,
)

from octavo import LLM, PoolingParams, RequestError
from octavo.base.errors import OctavoError
from octavo.config.pair_templates import PAIR_TEMPLATES
from octavo.messages.pooling import LateInteractionParams
from octavo.runtime.heads import pool
from octavo.runtime.models.encoder import Encoder
from octavo.runtime.models.interface import Family
from tests.tiny_encoders import make_encoder, make_tokenizer, save

PROMPTS = [[5, 9, 11], list(range(6, 90)), [7]]
TEXTS = ["w1 w2 w3", "w9 w4", " ".join(f"w{i}" for i in range(40))]
TOLERANCE = 1e-4
PREFIX = "sentence_transformers."
SPLADES = {
    BertForMaskedLM: "BertModel",
    DistilBertForMaskedLM: "DistilBertModel",
    ModernBertForMaskedLM: "ModernBertModel",
    MPNetForMaskedLM: "MPNetModel",
    RobertaForMaskedLM: "RobertaModel",
}


def engine(folder, **options):
    return LLM(str(folder), cpu_threads=1, dtype="float32", activations="float32", **options)


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def write_modules(folder, *modules):
    """Makes a Sentence-BERT folder of it: (dotted type, config, weights) behind the transformer."""
    entries = [{"idx": 0, "name": "0", "path": "", "type": f"{PREFIX}base.modules.transformer.Transformer"}]
    for number, (kind, config, weights) in enumerate(modules, 1):
        path = folder / f"{number}"
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config))
        if weights:
            save_file(weights, path / "model.safetensors")
        entries.append({"idx": number, "name": str(number), "path": path.name, "type": PREFIX + kind})
    (folder / "modules.json").write_text(json.dumps(entries))


@torch.no_grad()
def logits_of(oracle, ids):
    return oracle(input_ids=torch.tensor([ids])).logits[0]


@torch.no_grad()
def states(oracle, ids):
    return oracle(input_ids=torch.tensor([ids])).last_hidden_state[0]


def embeddings(llm, prompts):
    return np.array([out.outputs.embedding for out in llm.embed(prompts, use_tqdm=False)])


@pytest.mark.parametrize("kind", SPLADES)
def test_weights_of_terms(tmp_path, kind, monkeypatch):
    oracle = make_encoder(kind, SPLADES[kind])
    folder = save(oracle, tmp_path)
    expected = [logits_of(oracle, ids).relu().log1p().amax(0).numpy() for ids in PROMPTS]
    with engine(folder) as llm:
        np.testing.assert_allclose(embeddings(llm, PROMPTS), expected, atol=TOLERANCE)
    monkeypatch.setattr(Encoder, "logits", lambda self, hidden: super(Encoder, self).logits(hidden))
    with engine(folder) as llm:  # without the layer before the head
        assert np.abs(embeddings(llm, PROMPTS) - expected).max() > 1e-2


@pytest.mark.parametrize("strategy", ["max", "sum"])
@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
def test_a_sparse_encoders_folder(tmp_path, strategy, activation):
    oracle = make_encoder(BertForMaskedLM, "BertModel")
    folder = save(oracle, tmp_path)
    said = {"pooling_strategy": strategy, "activation_function": activation, "embedding_dimension": None}
    write_modules(folder, ("sparse_encoder.modules.splade_pooling.SpladePooling", said, None))
    expected = []
    for ids in PROMPTS:
        weights = logits_of(oracle, ids).relu().log1p()
        weights = weights.log1p() if activation == "log1p_relu" else weights
        expected.append((weights.amax(0) if strategy == "max" else weights.sum(0)).numpy())
    with engine(folder) as llm:
        np.testing.assert_allclose(embeddings(llm, PROMPTS), expected, rtol=1e-4, atol=TOLERANCE)
        ids = [out.prompt_token_ids for out in llm.embed(TEXTS[:2], use_tqdm=False)]
        first, second = embeddings(llm, ids)
        [score] = llm.score(TEXTS[0], TEXTS[1], use_tqdm=False)
    assert score.outputs.score == pytest.approx(float(first @ second), rel=1e-5)


@pytest.fixture
def colbert(tmp_path):
    oracle = make_encoder(BertModel, "BertModel")
    torch.manual_seed(5)
    return oracle, save(oracle, tmp_path), torch.randn(16, 48) / 7


def maxsim(query, document):
    return float((query @ document.T).max(1).values.sum())


def unit(x):
    return functional.normalize(x, dim=-1)


def ids_of(text):
    return make_tokenizer(131).encode(text).ids


def test_colbert(colbert):
    oracle, folder, weight = colbert
    stored = load_file(folder / "model.safetensors")
    save_file(stored | {"linear.weight": weight}, folder / "model.safetensors")
    change_config(folder, architectures=["HF_ColBERT"], colbert_dim=16)
    with engine(folder) as llm:
        [out] = llm.encode([PROMPTS[1]], use_tqdm=False)
        [score] = llm.score(TEXTS[0], TEXTS[1], use_tqdm=False)
    np.testing.assert_allclose(out.outputs.data, unit(states(oracle, PROMPTS[1]) @ weight.T), atol=1e-5)
    query, document = (unit(states(oracle, ids_of(text)) @ weight.T) for text in TEXTS[:2])
    assert score.outputs.score == pytest.approx(maxsim(query, document), abs=1e-4)


def interacting(mode, key, uses=None):
    return PoolingParams(late_interaction_params=LateInteractionParams(mode, key, uses))


def test_documents_scored_where_their_query_is(colbert, monkeypatch):
    oracle, folder, weight = colbert
    stored = load_file(folder / "model.safetensors")
    save_file(stored | {"linear.weight": weight}, folder / "model.safetensors")
    change_config(folder, architectures=["HF_ColBERT"], colbert_dim=16)
    first, second, *_, third = [*PROMPTS, ids_of(TEXTS[2])]
    vectors = [unit(states(oracle, ids) @ weight.T) for ids in (first, second, third)]
    monkeypatch.setattr(pool, "MAX_QUERIES", 2)
    with engine(folder) as llm:

        def results(prompts, *asked):
            return [float(out.outputs.data) for out in llm.encode(prompts, list(asked), use_tqdm=False)]

        queries = interacting("cache_query", "a", 3), interacting("cache_query", "b")
        assert results([first, third], *queries) == [0, 0]
        of_a, of_b = interacting("score_doc", "a"), interacting("score_doc", "b")
        found = results([second, third, second], of_a, of_b, of_a)
        expected = [maxsim(vectors[0], vectors[1]), maxsim(vectors[2], vectors[2])]
        assert found == pytest.approx([*expected, expected[0]], abs=1e-4)
        with pytest.raises(OctavoError, match="no query 'b'"):  # it was for one document
            results([second], of_b)
        assert results([third], of_a) == pytest.approx([maxsim(vectors[0], vectors[2])], abs=1e-4)
        with pytest.raises(OctavoError, match="no query 'a'"):
            results([third], of_a)
        for key in "cde":
            results([first], interacting("cache_query", key))
        with pytest.raises(OctavoError, match="no query 'c'"):  # two are kept
            results([first], interacting("score_doc", "c"))
        assert len(results([first, first], *(interacting("score_doc", key) for key in "de"))) == 2


@pytest.mark.parametrize(
    ("given", "field"),
    [(("cache", "a"), "mode"), (("score_doc", ""), "query_key"), (("cache_query", "a", 0), "query_uses")],
)
def test_wrong_late_interaction(given, field):
    with pytest.raises(RequestError, match=field):
        LateInteractionParams(*given)
    with pytest.raises(RequestError, match="late_interaction_params"):
        PoolingParams(late_interaction_params=given)


@pytest.mark.parametrize("skips", [False, True])
def test_a_multi_vector_encoders_folder(colbert, skips):
    oracle, folder, weight = colbert
    query = unit(states(oracle, ids_of("w7 w4 w9 w4")) @ weight.T)
    ids = ids_of("w8 " + TEXTS[2])
    document = unit(states(oracle, ids) @ weight.T)
    best = ids[int((query[0] @ document.T).argmax())]  # skipped, it changes the score
    kept = [i for i, token in enumerate(ids) if not (skips and token == best)]
    words = [make_tokenizer(131).id_to_token(best), "no such word"] if skips else []
    places = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
    identity = {"activation_function": "torch.nn.modules.linear.Identity", "bias": False}
    mask = {"skiplist_words": words, "skiplist_tasks": ["document"], "keep_only_token_ids": None}
    write_modules(
        folder,
        (
            "base.modules.dense.Dense",
            {"in_features": 48, "out_features": 16} | identity | places,
            {"linear.weight": weight},
        ),
        ("multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask", mask, None),
        ("base.modules.normalize.Normalize", places, None),
    )
    prompts = {"prompts": {"query": "w7 ", "document": "w8 "}}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    with engine(folder) as llm:
        [score] = llm.score("w4 w9 w4", TEXTS[2], use_tqdm=False)
    assert score.outputs.score == pytest.approx(maxsim(query, document[kept]), abs=1e-4)
    assert (abs(maxsim(query, document) - maxsim(query, document[kept])) > 1e-3) == skips


def test_the_three_results_of_bge_m3(tmp_path):
    oracle = make_encoder(XLMRobertaModel, "XLMRobertaModel")
    folder = save(oracle, tmp_path)
    torch.manual_seed(5)
    heads = {
        "colbert_linear.weight": torch.randn(48, 48) / 7,
        "colbert_linear.bias": torch.randn(48),
        "sparse_linear.weight": torch.randn(1, 48) / 7,
        "sparse_linear.bias": torch.zeros(1),
    }
    x = states(oracle, PROMPTS[1])
    heads["sparse_linear.bias"] -= (x @ heads["sparse_linear.weight"].T).median()
    for name in ("colbert_linear", "sparse_linear"):
        layer = {part: heads[f"{name}.{part}"] for part in ("weight", "bias")}
        save_file(layer, folder / f"{name}.safetensors")
    dense = unit(x[0])
    vectors = unit(x[1:] @ heads["colbert_linear.weight"].T + heads["colbert_linear.bias"])
    weights = (x[1:-1] @ heads["sparse_linear.weight"].T + heads["sparse_linear.bias"]).relu()
    with engine(folder, hf_overrides={"architectures": ["BgeM3EmbeddingModel"]}) as llm:
        found = {
            task: llm.encode([PROMPTS[1]], pooling_task=task, use_tqdm=False)[0].outputs.data
            for task in ("embed", "token_embed", "token_classify")
        }
    np.testing.assert_allclose(found["embed"], dense, atol=1e-5)
    np.testing.assert_allclose(found["token_embed"], vectors, atol=1e-5)
    np.testing.assert_allclose(found["token_classify"], weights, atol=TOLERANCE)
    assert 0 < (weights == 0).sum() < len(weights)


def test_distilbert_classifies(tmp_path):
    oracle = make_encoder(DistilBertForSequenceClassification, "DistilBertModel", num_labels=3)
    with engine(save(oracle, tmp_path)) as llm:
        found = [out.outputs.probs for out in llm.classify(PROMPTS, use_tqdm=False)]
    expected = torch.stack([logits_of(oracle, ids) for ids in PROMPTS]).softmax(-1)
    np.testing.assert_allclose(found, expected.numpy(), atol=TOLERANCE)


DECODER = {"num_key_value_heads": 2, "head_dim": 16, "pad_token_id": None}
YES, NO = 10, 11  # w5, w6
PAIRS = [("w1 w2", "w3 w4 w9"), ("w1 w2", "w30"), ("w50", "w1 w60")]


def prompt_ids(name, query, document, instruction=None):
    """The authors' prompt, token by token as the plain tokenizer cuts it: without [CLS] and [SEP]."""
    template, tokenizer = PAIR_TEMPLATES[name], make_tokenizer(131)
    body = template.body.replace(
        "{instruction}", template.instruction if instruction is None else instruction
    )
    body = body.replace("{query}", query).replace("{document}", document)
    rest = (tokenizer.encode(text, add_special_tokens=False).ids for text in (body, template.after))
    return [*tokenizer.encode(template.before).ids, *(token for ids in rest for token in ids)]


@pytest.mark.parametrize("form", ["original", "logit_score"])
def test_the_original_qwen3_reranker(tmp_path, form):
    oracle = make_encoder(Qwen3ForCausalLM, "BertModel", model_type="qwen3", **DECODER)
    folder, overrides = save(oracle, tmp_path), {}
    if form == "original":
        overrides = {"architectures": ["Qwen3ForSequenceClassification"], "is_original_qwen3_reranker": True}
        overrides |= {"classifier_from_token": ["w6", "w5"]}
    else:
        said = {"true_token_id": YES, "false_token_id": NO, "module_input_name": "causal_logits"}
        write_modules(folder, ("cross_encoder.modules.logit_score.LogitScore", said, None))

    def expected(instruction=None):
        logits = [logits_of(oracle, prompt_ids("qwen3", *pair, instruction))[-1] for pair in PAIRS]
        return [x[[NO, YES]].softmax(-1)[1].item() for x in logits]

    firsts, seconds = zip(*PAIRS, strict=True)
    with engine(folder, hf_overrides=overrides) as llm:
        found = [out.outputs.score for out in llm.score(firsts, seconds, use_tqdm=False)]
        told = llm.score(firsts, seconds, instruction="w70 w71", use_tqdm=False)
    np.testing.assert_allclose(found, expected(), atol=TOLERANCE)
    np.testing.assert_allclose([out.outputs.score for out in told], expected("w70 w71"), atol=TOLERANCE)
    with engine(folder, hf_overrides=overrides, pooler_config={"template": False}) as llm:
        bare = [out.outputs.score for out in llm.score(firsts, seconds, use_tqdm=False)]
    assert np.abs(np.array(bare) - expected()).max() > 1e-2  # the template matters


def test_the_converted_qwen3_reranker(tmp_path):
    oracle = make_encoder(
        Qwen3ForSequenceClassification, "BertModel", model_type="qwen3", num_labels=1, **DECODER
    )
    folder = save(oracle, tmp_path)
    firsts, seconds = zip(*PAIRS, strict=True)
    with engine(folder) as llm:
        found = [out.outputs.score for out in llm.score(firsts, seconds, use_tqdm=False)]
    expected = [logits_of(oracle, prompt_ids("qwen3", *pair)).sigmoid().item() for pair in PAIRS]
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)


def test_a_reranker_of_gemma(tmp_path):
    oracle = make_encoder(GemmaForCausalLM, "BertModel", model_type="gemma", **DECODER)
    folder = save(oracle, tmp_path)
    overrides = {"architectures": ["GemmaForSequenceClassification"], "classifier_from_token": ["w5"]}
    overrides |= {"method": "no_post_processing"}
    firsts, seconds = zip(*PAIRS, strict=True)
    with engine(folder, hf_overrides=overrides) as llm:
        found = [out.outputs.score for out in llm.score(firsts, seconds, use_tqdm=False)]
        cut = llm.score(
            firsts[0],
            " ".join(["w3"] * 400),
            tokenization_kwargs={"truncate_prompt_tokens": -1},
            use_tqdm=False,
        )
    expected = [logits_of(oracle, prompt_ids("gemma", *pair))[-1, YES].sigmoid().item() for pair in PAIRS]
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)
    end = make_tokenizer(131).encode(PAIR_TEMPLATES["gemma"].after, add_special_tokens=False).ids
    assert cut[0].prompt_token_ids[-len(end) :] == end  # a long document loses its own end only
    assert len(cut[0].prompt_token_ids) == 160


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ({"classifier_from_token": ["no such token"]}, "has no token 'no such token'"),
        ({"classifier_from_token": "w5"}, "must be a list of tokens"),
        ({"classifier_from_token": ["w5"], "is_original_qwen3_reranker": True}, "two tokens"),
    ],
)
def test_wrong_tokens_for_labels(tmp_path, overrides, text):
    oracle = make_encoder(Qwen3ForCausalLM, "BertModel", model_type="qwen3", **DECODER)
    with pytest.raises(ValueError, match=text):
        engine(save(oracle, tmp_path), hf_overrides=overrides)


def test_a_family_without_a_masked_head(tmp_path, monkeypatch):
    oracle = make_encoder(BertForMaskedLM, "BertModel")
    folder = save(oracle, tmp_path)
    monkeypatch.setattr("octavo.runtime.models.bert.Bert.MASKED_HEAD", Family.MASKED_HEAD)
    with pytest.raises(ValueError, match="has no head that fills masked places"):
        engine(folder)


def test_tasks_of_a_sparse_encoder(tmp_path):
    oracle = make_encoder(BertForMaskedLM, "BertModel")
    with engine(save(oracle, tmp_path)) as llm, pytest.raises(ValueError, match="Unsupported task"):
        llm.encode(["w1"], PoolingParams(task="token_embed"), use_tqdm=False)
