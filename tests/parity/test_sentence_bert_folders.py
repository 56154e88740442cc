"""Whole Sentence-BERT folders, in both spellings of their files, against the formulas of their modules."""

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional
from transformers import BertModel

from octavo import LLM, EngineArgs, PoolingParams
from octavo.base.errors import OctavoError
from octavo.config import resolve
from tests.tiny_encoders import make_encoder, save

pytestmark = pytest.mark.matrix(3)

TEXTS = ["w1 w2 w3", "w9", " ".join(f"w{i}" for i in range(60))]
SIZE = 48
OLD = "sentence_transformers.models."
NEW = "sentence_transformers.sentence_transformer.modules."
SWITCHES = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
FORMULAS = {
    "cls": lambda x, skip: x[skip],
    "max": lambda x, skip: x[skip:].max(0).values,
    "mean": lambda x, skip: x[skip:].mean(0),
    "mean_sqrt_len_tokens": lambda x, skip: x[skip:].sum(0) / math.sqrt(len(x) - skip),
    "weightedmean": lambda x, skip: (
        sum((i + 1) * x[i] for i in range(skip, len(x))) / sum(i + 1 for i in range(skip, len(x)))
    ),
    "lasttoken": lambda x, skip: x[-1],
}


@pytest.fixture(scope="module")
def oracle():
    return make_encoder(BertModel, "BertModel")


@pytest.fixture
def write(tmp_path, oracle):
    """Writes a folder: the model, and modules by (kind, config, weights)."""

    def make(modules, prefix=OLD, **files):
        folder = save(oracle, tmp_path)
        entries = [{"idx": 0, "name": "0", "path": "", "type": f"{prefix}Transformer"}]
        for number, (kind, config, weights) in enumerate(modules, 1):
            path = folder / f"{number}_{kind}"
            path.mkdir(exist_ok=True)
            (path / "config.json").write_text(json.dumps(config))
            if weights:
                save_file(weights, path / "model.safetensors")
            entries.append({"idx": number, "name": str(number), "path": path.name, "type": f"{prefix}{kind}"})
        (folder / "modules.json").write_text(json.dumps(entries))
        for name, content in files.items():
            (folder / f"{name}.json").write_text(json.dumps(content))
        return folder

    return make


def found(folder, texts=TEXTS, params=None):
    with LLM(str(folder), cpu_threads=1, activations="float32") as llm:
        outputs = llm.embed(texts, params, use_tqdm=False)
    return np.array([out.outputs.embedding for out in outputs])


def states(oracle, texts):
    ids = [[2, *(int(word[1:]) + 5 for word in text.split()), 3] for text in texts]
    with torch.no_grad():
        return [oracle(input_ids=torch.tensor([row])).last_hidden_state[0] for row in ids]


@pytest.mark.parametrize("mode", SWITCHES)
@pytest.mark.parametrize("spelling", ["switches", "name"])
def test_each_mode(write, oracle, mode, spelling):
    config = {
        "word_embedding_dimension": SIZE,
        SWITCHES[mode]: True,
        "pooling_mode_mean_tokens": mode == "mean",
    }
    if spelling == "name":
        config = {"embedding_dimension": SIZE, "pooling_mode": mode}
    folder = write([("Pooling", config, None)], OLD if spelling == "switches" else NEW)
    expected = np.stack([FORMULAS[mode](x, 0).numpy() for x in states(oracle, TEXTS)])
    np.testing.assert_allclose(found(folder), expected, rtol=1e-5, atol=2e-5)


def test_modes_are_joined(write, oracle):
    folder = write([("Pooling", {"pooling_mode": ["mean", "cls"]}, None)])
    expected = [torch.cat([FORMULAS[m](x, 0) for m in ("mean", "cls")]) for x in states(oracle, TEXTS)]
    np.testing.assert_allclose(found(folder), torch.stack(expected).numpy(), atol=2e-5)


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("mode", ["mean", "weightedmean", "cls", "max"])
def test_prompts_of_the_model(write, oracle, mode, include):
    said = {"prompts": {"query": "w7 w8 "}, "default_prompt_name": "query"}
    pooling = {"pooling_mode": mode, "include_prompt": include}
    folder = write([("Pooling", pooling, None)], config_sentence_transformers=said)
    config = resolve(EngineArgs(model=str(folder))).pooling
    assert (config.prompts, config.default_prompt) == ({"query": "w7 w8 "}, "query")
    asked = [{"prompt": text, "instruction": "w7 w8 "} for text in TEXTS]
    whole = states(oracle, ["w7 w8 " + text for text in TEXTS])
    expected = np.stack([FORMULAS[mode](x, 0 if include else 3).numpy() for x in whole])
    np.testing.assert_allclose(found(folder, asked), expected, rtol=1e-5, atol=2e-5)


def dense(outputs, **changes):
    torch.manual_seed(outputs)
    weights = {"linear.weight": torch.randn(outputs, SIZE) / 7, "linear.bias": torch.randn(outputs)}
    config = {"in_features": SIZE, "out_features": outputs, "bias": True}
    return weights, config | {"activation_function": "torch.nn.modules.activation.Tanh"} | changes


def test_a_chain_and_its_cuts(write, oracle):
    weights, config = dense(32)
    torch.manual_seed(0)
    norm = {"norm.weight": torch.rand(32) + 0.5, "norm.bias": torch.randn(32)}
    modules = [
        ("Pooling", {"pooling_mode": "mean"}, None),
        ("Dense", config, weights),
        ("LayerNorm", {"dimension": 32}, norm),
        ("Normalize", {}, None),
    ]
    folder = write(modules)
    means = torch.stack([x.mean(0) for x in states(oracle, TEXTS)])
    x = torch.tanh(means @ weights["linear.weight"].T + weights["linear.bias"])
    x = functional.layer_norm(x, (32,), norm["norm.weight"], norm["norm.bias"])
    np.testing.assert_allclose(found(folder), functional.normalize(x, dim=-1).numpy(), atol=1e-5)
    settings = json.loads((folder / "config.json").read_text()) | {"matryoshka_dimensions": [8, 32]}
    (folder / "config.json").write_text(json.dumps(settings))
    cut = found(folder, params=PoolingParams(dimensions=8))
    np.testing.assert_allclose(cut, functional.normalize(x[:, :8], dim=-1).numpy(), atol=1e-5)
    wrong_order = functional.normalize(x, dim=-1)[:, :8].numpy()
    assert np.abs(cut - wrong_order).max() > 1e-2


def test_the_longest_text_is_the_folders(write):
    folder = write([("Pooling", {"pooling_mode": "mean"}, None)], sentence_bert_config={"max_seq_length": 16})
    assert resolve(EngineArgs(model=str(folder))).model.max_model_len == 16


MEAN = ("Pooling", {"pooling_mode": "mean"}, None)
UNKNOWN = [
    ([("Pooling", {"pooling_mode": "median"}, None)], "median"),
    ([("Pooling", {"pooling_mode_median_tokens": True}, None)], "pooling_mode_median_tokens"),
    ([MEAN, ("LSTM", {}, None)], "LSTM"),
    ([MEAN, ("Dense", dense(8, activation_function="os.system")[1], dense(8)[0])], "os.system"),
    ([MEAN, ("Dense", dense(8, use_residual=True)[1], dense(8)[0])], "use_residual"),
    ([("Dense", dense(8)[1], dense(8)[0])], "modules must be"),
]


@pytest.mark.parametrize(("modules", "says"), UNKNOWN, ids=[says for _, says in UNKNOWN])
def test_what_is_not_known_stops_the_start(write, modules, says):
    with pytest.raises(OctavoError, match=says):
        resolve(EngineArgs(model=str(write(modules))))


def test_modules_of_others_and_paths_outside_are_refused(write):
    folder = write([MEAN])
    entries = json.loads((folder / "modules.json").read_text())
    for change in ({"type": "my_code.Pooling"}, {"path": "../elsewhere"}):
        (folder / "modules.json").write_text(json.dumps([entries[0], entries[1] | change]))
        with pytest.raises(OctavoError, match=r"modules\.json"):
            resolve(EngineArgs(model=str(folder)))


def test_a_dense_module_without_weights_stops_the_start(write):
    folder = write([MEAN, ("Dense", dense(8)[1], None)])
    with pytest.raises(OctavoError, match="2_Dense holds no"):
        LLM(str(folder), cpu_threads=1)
