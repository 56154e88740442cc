"""Models with experts: layouts of checkpoints, what is wrong in them, and checks that must fail."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.base.errors import BadCheckpoint
from octavo.runtime.layers.experts import ExpertsArch
from octavo.runtime.layers.rotary import Rope
from octavo.runtime.models.interface import MODELS
from tests.model_driver import load, prompt_logits
from tests.tiny_models import edit_config, make_oracle, make_prompts, oracle_logits, save, tiny_config

WITH_EXPERTS = [
    name for name in MODELS.names() if "router" in str(MODELS.load(name).arch_from_hf(tiny_config(name)))
]
TOLERANCE = 1e-4


def differences(oracle, model) -> list[float]:
    """The largest difference of logits, for each prompt."""
    prompts = make_prompts(oracle.config.vocab_size)
    pairs = zip(prompt_logits(model, prompts), prompts, strict=True)
    return [float((logits - oracle_logits(oracle, prompt)).abs().max()) for logits, prompt in pairs]


@pytest.mark.parametrize("architecture", WITH_EXPERTS)
def test_tensors_as_transformers_5_names_them(tmp_path, architecture):
    """The names of its modules, with one tensor for all experts."""
    oracle = make_oracle(tiny_config(architecture))
    folder = save(oracle, tmp_path)
    save_file({name: x.clone() for name, x in oracle.state_dict().items()}, folder / "model.safetensors")
    assert max(differences(oracle, load(folder))) <= TOLERANCE


def _route(**change):
    """Return what changes the router of layers that have one."""

    def changed(layer):
        experts = layer.feed_forward
        if not isinstance(experts, ExpertsArch):
            return layer
        return replace(layer, feed_forward=replace(experts, router=experts.router._replace(**change)))

    return changed


def _experts(**change):
    def changed(layer):
        experts = layer.feed_forward
        if not isinstance(experts, ExpertsArch):
            return layer
        return replace(layer, feed_forward=replace(experts, **change))

    return changed


MUTANTS = {
    "normalised": ("OlmoeForCausalLM", _route(normalises=True)),
    "softmax_of_chosen": ("OlmoeForCausalLM", _route(scores="logits")),
    "fewer": ("OlmoeForCausalLM", _route(top_k=2)),
    "not_normalised": ("DeepseekV3ForCausalLM", _route(normalises=False)),
    "best_of_group": ("DeepseekV3ForCausalLM", _route(best_of_group=1)),
    "sum_of_group": ("DeepseekV2ForCausalLM", _route(best_of_group=2)),
    "no_groups": ("DeepseekV2ForCausalLM", _route(num_groups=1, top_groups=1)),
    "no_factor": ("DeepseekV2ForCausalLM", _route(factor=1.0)),
    "one_mscale": (
        "DeepseekV3ForCausalLM",
        lambda layer: replace(layer, attention=replace(layer.attention, scale=24**-0.5)),
    ),
    "other_mscale": (
        "DeepseekV3ForCausalLM",
        lambda layer: replace(layer, rope=replace(layer.rope, attention_factor=1.0)),
    ),
    "no_clamp": ("GptOssForCausalLM", _experts(limit=1e9)),
    "other_alpha": ("GptOssForCausalLM", _experts(alpha=1.0)),
    "truncated": (
        "GptOssForCausalLM",
        lambda layer: replace(layer, rope=replace(layer.rope, truncate=True)),
    ),
    "all_experts_weigh": ("GptOssForCausalLM", _route(scores="softmax")),
    "weights_behind": ("Llama4ForCausalLM", _experts(weighs_inputs=False)),
    "no_unit_norms": (
        "Llama4ForCausalLM",
        lambda layer: replace(layer, attention=replace(layer.attention, qk_norm="none")),
    ),
    "all_rotate": ("Llama4ForCausalLM", lambda layer: replace(layer, rope=layer.rope or Rope(dim=16))),
    "rope_of_halves": (
        "DeepseekV2ForCausalLM",
        lambda layer: replace(layer, rope=replace(layer.rope, interleaved=False)),
    ),
}
"""One mechanism broken each."""


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_shows(tmp_path, monkeypatch, name):
    architecture, change = MUTANTS[name]
    family = MODELS.load(architecture)
    read = family.arch_from_hf

    def changed(config):
        arch = read(config)
        return replace(arch, layers=tuple(change(layer) for layer in arch.layers))

    oracle = make_oracle(tiny_config(architecture))
    folder = save(oracle, tmp_path)
    assert max(differences(oracle, load(folder))) <= TOLERANCE
    monkeypatch.setattr(family, "arch_from_hf", staticmethod(changed))
    assert max(differences(oracle, load(folder))) > 1e-2


def test_layers_for_drafting_are_left_out(tmp_path):
    """DeepSeek-V3 and GLM-4.5 bring one behind the last."""
    oracle = make_oracle(tiny_config("Glm4MoeForCausalLM"))
    folder = save(oracle, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.3.eh_proj.weight"] = torch.zeros(48, 96)
    tensors["model.layers.3.mlp.experts.0.up_proj.weight"] = torch.zeros(32, 48)
    save_file(tensors, folder / "model.safetensors")
    assert max(differences(oracle, load(folder))) <= TOLERANCE


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ({"n_group": 3}, "n_group must divide the 8 experts"),
        ({"n_group": 2, "topk_group": 3}, "topk_group be at most n_group"),
        ({"n_group": 8, "topk_group": 1}, "groups of 1 experts are too few or too small"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace must be a number of layers"),
    ],
)
def test_bad_groups(tmp_path, entries, text):
    folder = save(make_oracle(tiny_config("DeepseekV3ForCausalLM")), tmp_path)
    with pytest.raises(BadCheckpoint, match=text):
        load(edit_config(folder, **entries))


def test_a_missing_expert_is_named(tmp_path):
    folder = save(make_oracle(tiny_config("Qwen3MoeForCausalLM")), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.5.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=r"lacks 1 weights: layers\.1\.mlp\.experts\.up\.weight:5\.up"):
        load(folder)


def test_a_wrong_expert_is_named(tmp_path):
    folder = save(make_oracle(tiny_config("Qwen3MoeForCausalLM")), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.experts.5.up_proj.weight"] = torch.zeros(31, 48)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        BadCheckpoint, match=r"experts\.5\.up_proj.*expected shape \[1, 32, 48\], found \[31, 48\]"
    ):
        load(folder)


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9 is more than the 8 experts"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok must be a positive integer"),
        ({"num_experts": "8"}, "num_experts must be a positive integer"),
        ({"mlp_only_layers": 1}, "mlp_only_layers must be a list"),
    ],
)
def test_bad_configs(tmp_path, entries, text):
    folder = save(make_oracle(tiny_config("Qwen3MoeForCausalLM")), tmp_path)
    with pytest.raises(BadCheckpoint, match=text):
        load(edit_config(folder, **entries))


def test_windows_of_exaone():
    read, config = MODELS.load("Exaone4ForCausalLM").arch_from_hf, tiny_config("Exaone4ForCausalLM")
    for given, expected in (({}, [24, 24, 24, 0, 24]), ({"sliding_window_pattern": "LG"}, [24, 0, 24, 0, 0])):
        layers = read(config | given).layers
        assert [layer.sliding_window for layer in layers] == expected
        assert [layer.rope is None for layer in layers] == [not window for window in expected]
    assert all(layer.rope for layer in read(config | {"sliding_window": None}).layers)
