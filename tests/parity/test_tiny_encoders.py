"""Every encoder against transformers, in float32, through the engine; and what must make that fail."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

from octavo import LLM, PoolingParams
from octavo.runtime.kernels.position_bias import PositionBias
from octavo.runtime.layers import distance_bias
from octavo.runtime.layers.embedding import Embedding
from octavo.runtime.layers.rotary import Rope
from octavo.runtime.layers.self_attention import HeadsArch
from octavo.runtime.models import encoder
from octavo.runtime.models.arch import Arch
from octavo.runtime.models.encoder import Encoder
from octavo.runtime.models.rotary_bert import NomicBert
from tests.tiny_encoders import make_encoder, save

pytestmark = pytest.mark.matrix(3)

KINDS = (
    "BertModel",
    "DistilBertModel",
    "GteModel",
    "JinaEmbeddingsV3Model",
    "MPNetModel",
    "ModernBertModel",
    "NomicBertModel",
    "RobertaModel",
    "XLMRobertaModel",
)
LENGTHS = (1, 3, 16, 63, 64, 65, 150)
TOLERANCE = 1e-5


def prompts_of(oracle):
    generator = torch.Generator().manual_seed(3)
    low, high = 5, oracle.config.vocab_size
    return [torch.randint(low, high, (n,), generator=generator).tolist() for n in LENGTHS]


@torch.no_grad()
def states(oracle, ids, **inputs):
    return oracle(input_ids=torch.tensor([ids]), **inputs).last_hidden_state[0]


def engine(folder, **options):
    exact = {"cpu_threads": 1, "dtype": "float32", "activations": "float32"}
    return LLM(str(folder), pooler_config={"pooling_type": "MEAN"}, **exact | options)


def vectors(llm, prompts):
    return np.array([out.outputs.embedding for out in llm.embed(prompts, use_tqdm=False)])


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory):
    """The oracle of one architecture, and its checkpoint."""
    oracle = make_encoder(getattr(transformers, request.param), request.param)
    return oracle, save(oracle, tmp_path_factory.mktemp(request.param))


def expected(oracle, prompts):
    means = torch.stack([states(oracle, ids).mean(0) for ids in prompts])
    return torch.nn.functional.normalize(means, dim=-1).numpy()


@pytest.mark.parametrize(("activations", "tolerance"), [("float32", TOLERANCE), ("auto", 1e-4)])
def test_mean_vectors(pair, activations, tolerance):
    """Exact; and with products of 16 bits where the CPU has tiles, which these models, made so, show most."""
    oracle, folder = pair
    prompts = prompts_of(oracle)
    with engine(folder, activations=activations) as llm:
        found = vectors(llm, prompts)
        assert np.abs(found - expected(oracle, prompts)).max() <= tolerance
        one_by_one = np.concatenate([vectors(llm, [prompt]) for prompt in prompts])
        turned = vectors(llm, prompts[::-1])[::-1]
    assert found.tobytes() == one_by_one.tobytes() == np.ascontiguousarray(turned).tobytes()


def test_token_vectors(pair):
    oracle, folder = pair
    prompt = prompts_of(oracle)[-1]
    with engine(folder) as llm:
        params = PoolingParams(use_activation=False)
        [out] = llm.encode([prompt], params, pooling_task="token_embed", use_tqdm=False)
    np.testing.assert_allclose(out.outputs.data, states(oracle, prompt).numpy(), atol=3e-4)


def fails(oracle, folder, **options):
    """Whether the check of `test_mean_vectors` notices."""
    prompts = prompts_of(oracle)
    with engine(folder, **options) as llm:
        return np.abs(vectors(llm, prompts) - expected(oracle, prompts)).max() > 1e-2


def test_a_causal_mask_is_noticed(pair, monkeypatch):
    made = Arch.for_pooling
    monkeypatch.setattr(Arch, "for_pooling", lambda arch, **given: made(arch, **given | {"is_causal": True}))
    terms = PositionBias._of_length
    later = torch.full((200, 200), -math.inf).triu(1)
    monkeypatch.setattr(PositionBias, "_of_length", lambda self, n: terms(self, n) + later[:n, :n])
    assert fails(*pair)


def test_missing_token_types_are_noticed(pair, monkeypatch):
    embed, has_types = Encoder.embed, "type_vocab_size" in pair[0].config.to_dict()

    def without(self, batch):
        types, self.embed_types = self.embed_types, None
        try:
            return embed(self, batch)
        finally:
            self.embed_types = types

    monkeypatch.setattr(Encoder, "embed", without)
    assert fails(*pair) == has_types


def test_another_scale_is_noticed(pair, monkeypatch):
    made = HeadsArch.__init__
    monkeypatch.setattr(
        HeadsArch, "__init__", lambda self, **fields: made(self, **fields | {"scale": fields["scale"] * 0.7})
    )
    assert fails(*pair)


def first_position(oracle):
    """Of the families that learn positions, some count from behind the padding token's."""
    counts = type(oracle).__name__ in ("RobertaModel", "XLMRobertaModel", "MPNetModel")
    return oracle.config.pad_token_id + 1 if counts else 0


def test_positions_from_0_are_noticed(pair, monkeypatch):
    oracle, folder = pair
    monkeypatch.setattr(encoder, "Embedding", lambda *given, **first: Embedding(*given))
    assert fails(oracle, folder) == (first_position(oracle) > 0)


ROTATING = ("GteModel", "JinaEmbeddingsV3Model", "ModernBertModel", "NomicBertModel")


@pytest.mark.parametrize("pair", ROTATING, indirect=True)
def test_another_theta_is_noticed(pair, monkeypatch):
    waves = Rope._wavelengths
    monkeypatch.setattr(Rope, "_wavelengths", lambda self: waves(replace(self, theta=3 * self.theta)))
    assert fails(*pair)


@pytest.mark.parametrize("change", [{"local_attention": 26}, {"local_attention": 1000}, {"every": 2}])
@pytest.mark.parametrize("pair", ["ModernBertModel"], indirect=True)
def test_another_window_is_noticed(pair, change):
    kinds = ["full_attention", "sliding_attention"] * 2
    assert fails(*pair, hf_overrides={"layer_types": kinds} if "every" in change else change)


@pytest.mark.parametrize("pair", ["MPNetModel"], indirect=True)
@pytest.mark.parametrize("part", ["_MAX_DISTANCE", "BUCKETS"])
def test_other_distances_are_noticed(pair, monkeypatch, part):
    if part == "BUCKETS":
        monkeypatch.setattr(distance_bias, "_bucket", lambda distances, **_: distances.clamp(-8, 7) + 8)
    else:
        monkeypatch.setattr(distance_bias, part, 64)
    assert fails(*pair)


def test_ntk_stretches_the_waves_of_gte(tmp_path):
    """The formula of GTE's own code, as another theta of plain ropes, for which there is an oracle."""
    oracle = make_encoder(transformers.GteModel, "GteModel")
    dim, factor = oracle.config.hidden_size // oracle.config.num_attention_heads, 8.0
    exponents = torch.arange(0, dim, 2) / dim
    frequencies = 1.0 / ((160000.0 * factor) ** exponents) / factor ** (2 / dim)
    oracle.rotary_emb.inv_freq = frequencies
    folder = save(oracle, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    own = {"rope_scaling": {"type": "ntk", "factor": factor}, "rope_theta": 160000.0, "model_type": "new"}
    own |= {"architectures": ["NewModel"], "position_embedding_type": "rope", "rope_parameters": None}
    (folder / "config.json").write_text(json.dumps(config | own))
    prompts = prompts_of(oracle)
    with engine(folder) as llm:
        assert np.abs(vectors(llm, prompts) - expected(oracle, prompts)).max() <= TOLERANCE
    assert fails(oracle, folder, hf_overrides={"rope_scaling": None})


def test_nomic_in_its_own_spelling(tmp_path):
    oracle = make_encoder(transformers.NomicBertModel, "NomicBertModel")
    folder = save(oracle, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    own = {"architectures": ["NomicBertModel"], "model_type": "nomic_bert", "activation_function": "swiglu"}
    own |= {own_name: config[name] for own_name, name in NomicBert.OWN_NAMES.items() if name in config}
    own |= {"rotary_emb_base": 1000, "vocab_size": config["vocab_size"], "type_vocab_size": 2}
    own |= {"n_positions": 8192, "max_trained_positions": 160, "prenorm": False, "rotary_emb_fraction": 1.0}
    (folder / "config.json").write_text(json.dumps(own))
    prompts = prompts_of(oracle)
    with engine(folder) as llm:
        assert llm.model_config.max_model_len == 160
        assert np.abs(vectors(llm, prompts) - expected(oracle, prompts)).max() <= TOLERANCE
    assert fails(oracle, folder, hf_overrides={"rotary_emb_base": 3000})


def test_the_longest_text_leaves_out_positions_of_padding(pair):
    oracle, folder = pair
    longest = 160 - first_position(oracle)
    prompt = [7 + i % 50 for i in range(longest)]
    with engine(folder) as llm:
        assert llm.model_config.max_model_len == longest
        found = vectors(llm, [prompt])
    assert np.abs(found - expected(oracle, [prompt])).max() <= TOLERANCE
