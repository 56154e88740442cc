"""Configs to `Arch`: the same meaning from the spellings of transformers 4 and 5, and clear refusals."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from octavo.base.errors import BadCheckpoint, ConfigError, Unsupported
from octavo.runtime.layers.mlp import DenseArch
from octavo.runtime.layers.norm import NormArch
from octavo.runtime.layers.rotary import DividedRope, LinearRope, Llama3Rope, Rope, YarnRope
from octavo.runtime.layers.self_attention import HeadsArch
from octavo.runtime.models.arch import read_arch, read_rope
from octavo.runtime.models.interface import MODELS
from tests.tiny_models import tiny_config

SIZES = {"vocab_size": 100, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3}


def arch_of(name, **changes):
    return MODELS.load(name).arch_from_hf(tiny_config(name) | changes)


@pytest.mark.parametrize("name", MODELS.names())
def test_tiny_configs_are_what_transformers_writes_back(name):
    """A TINY config, and the whole config.json that transformers makes of it, mean the same."""
    tiny = tiny_config(name)
    rest = {key: value for key, value in tiny.items() if key != "model_type"}
    written = AutoConfig.for_model(tiny["model_type"], **rest).to_dict()
    assert MODELS.load(name).arch_from_hf(written) == MODELS.load(name).arch_from_hf(tiny)


def test_defaults():
    arch = read_arch(SIZES)
    heads = HeadsArch(num_heads=4, num_kv_heads=4, head_dim=8, scale=8**-0.5)
    dense = DenseArch(intermediate_size=128, activation="silu", gated=True)
    assert {(layer.attention, layer.feed_forward) for layer in arch.layers} == {(heads, dense)}
    assert (arch.norm, arch.tied_head) == (NormArch(kind="rms", eps=1e-6), False)
    assert {layer.sliding_window for layer in arch.layers} == {0}
    assert len(arch.layers) == 3


@pytest.mark.parametrize(
    "config",
    [
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 500.0},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 500.0},
        {"rope_parameters": {"rope_theta": 500.0}, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ],
    ids=["transformers_5", "type", "transformers_4", "override"],
)
def test_spellings_of_rope(config):
    assert read_rope(SIZES | config, 8) == LinearRope(dim=8, theta=500.0, factor=2.0)


def test_partial_rotation():
    assert read_rope({"partial_rotary_factor": 0.5}, 8) == Rope(dim=4)
    assert read_rope({"rope_parameters": {"partial_rotary_factor": 0.25}}, 16) == Rope(dim=4)


def test_spellings_of_gemma3():
    old = tiny_config("Gemma3ForCausalLM")
    for key in ("rope_parameters", "layer_types"):
        del old[key]
    old |= {
        "sliding_window_pattern": 3,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    assert MODELS.load("Gemma3ForCausalLM").arch_from_hf(old) == arch_of("Gemma3ForCausalLM")


def test_windows_by_family():
    windows = {name: [layer.sliding_window for layer in arch_of(name).layers] for name in MODELS.names()}
    assert windows["Qwen2ForCausalLM"] == [0, 24, 24]  # from max_window_layers on
    assert windows["MistralForCausalLM"] == [24, 24, 24]
    assert windows["Gemma3ForCausalLM"] == [24, 24, 0, 24, 24, 0]
    unused = arch_of("Qwen2ForCausalLM", use_sliding_window=False)
    assert {layer.sliding_window for layer in unused.layers} == {0}
    off = arch_of("MistralForCausalLM", sliding_window=None)
    assert {layer.sliding_window for layer in off.layers} == {0}


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": 0},
        {"hidden_size": "32"},
        {"num_attention_heads": True},
        {"num_hidden_layers": -1},
        {"hidden_size": 30},
        {"num_key_value_heads": 3},
        {"vocab_size": None},
        {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}},
    ],
)
def test_impossible_configs(change):
    with pytest.raises(BadCheckpoint):
        read_arch(SIZES | change)


@pytest.mark.parametrize(
    "change",
    [
        {"layer_types": ["full_attention"] * 2},
        {"layer_types": ["linear_attention"] * 3},
        {"rope_scaling": {"rope_type": "spiral"}},
    ],
)
def test_unknown_kinds(change):
    with pytest.raises(Unsupported):
        read_arch(SIZES | change)


def test_an_unknown_architecture_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"Unknown model architecture 'X'\. Known: .*LlamaForCausalLM"):
        MODELS.load("X")


@pytest.mark.parametrize(
    "rope",
    [
        Rope(dim=16, theta=100.0),
        LinearRope(dim=16, factor=4.0),
        Llama3Rope(
            dim=16, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
        ),
        YarnRope(dim=16, factor=4.0, original_max_position_embeddings=64),
        YarnRope(dim=16, factor=4.0, original_max_position_embeddings=64, truncate=False, beta_fast=16.0),
        YarnRope(dim=16, factor=4.0, original_max_position_embeddings=64, mscale=0.7, mscale_all_dim=1.3),
    ],
    ids=repr,
)
def test_frequencies_are_those_of_transformers(rope):
    names = {Rope: "default", LinearRope: "linear", Llama3Rope: "llama3", YarnRope: "yarn"}
    fields = {
        k: v for k, v in vars(rope).items() if k not in ("dim", "theta", "interleaved") and v is not None
    }
    parameters = {"rope_type": names[type(rope)], "rope_theta": rope.theta, **fields}
    rest = {k: v for k, v in tiny_config("LlamaForCausalLM").items() if k != "model_type"}
    config = AutoConfig.for_model("llama", **rest | {"rope_parameters": parameters, "head_dim": 16})
    oracle = AutoModelForCausalLM.from_config(config).model.rotary_emb
    frequencies, factor = rope.frequencies()
    assert torch.equal(frequencies, oracle.inv_freq)
    assert factor == pytest.approx(oracle.attention_scaling)


def test_divisors_must_fit():
    assert torch.equal(DividedRope(dim=4, divisors=(1.0, 2.0)).frequencies()[0], torch.tensor([1.0, 0.005]))
    for divisors in ((1.0,), (1.0, 0.0)):
        with pytest.raises(BadCheckpoint, match="2 rope frequencies"):
            DividedRope(dim=4, divisors=divisors).frequencies()
