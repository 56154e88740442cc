"""Recurrent layers: checks that must fail, company and chunks that change nothing, and what is refused."""

from dataclasses import replace

import pytest
import torch

from octavo.base.errors import BadCheckpoint, Unsupported
from octavo.runtime.layers.recurrent import Recurrent
from octavo.runtime.layers.self_attention import SelfAttention
from tests.model_driver import Driver, load, prompt_logits
from tests.tiny_models import (
    RECURRENT,
    edit_config,
    make_oracle,
    make_prompts,
    oracle_logits,
    save,
    tiny_config,
)

TOLERANCE = 1e-4


def difference(oracle, model) -> float:
    """The largest difference of logits of a prompt that is computed in two chunks."""
    (prompt,) = make_prompts(131, (60,))
    (logits,) = prompt_logits(model, [prompt], 37)
    return float((logits - oracle_logits(oracle, prompt)).abs().max())


def test_dense_granite(tmp_path):
    """Without experts the shared block is the only one; attention may rotate."""
    config = tiny_config("GraniteMoeHybridForCausalLM") | {"num_local_experts": 0}
    oracle = make_oracle(config | {"position_embedding_type": "rope", "mamba_proj_bias": True})
    assert difference(oracle, load(save(oracle, tmp_path))) <= TOLERANCE


def test_lists_of_layers_in_old_configs(tmp_path):
    oracle = make_oracle(tiny_config("Lfm2ForCausalLM"))
    folder = edit_config(save(oracle, tmp_path), layer_types=None, full_attn_idxs=[1])
    assert difference(oracle, load(folder)) <= TOLERANCE


def _roll_weights(layer):
    weight = layer._conv.weight
    weight.copy_(weight.roll(1, 0))


def _drop_gates(layer):
    layer._kernels = replace(layer._kernels, gate=lambda x, gates, form: x)


def _grow(layer):
    layer._decay.rate.neg_().mul_(0.01)


def _forget_bias(layer):
    layer._decay.bias.zero_()


def _forget_skip(layer):
    layer._decay.skip.zero_()


def _forget_state(layer):
    of = layer.states

    def nothing(batch):
        return of(batch)._replace(batch=replace(batch, kv_lens=batch.cu_q_lens.diff()))

    layer.states = nothing


MUTANTS = {
    "convolution_shifted": (_roll_weights, RECURRENT),
    "state_forgotten_between_chunks": (_forget_state, RECURRENT),
    "gate_dropped": (_drop_gates, ["GraniteMoeHybridForCausalLM", "Qwen3NextForCausalLM"]),
    "sign_of_the_decay": (_grow, ["GraniteMoeHybridForCausalLM", "Qwen3NextForCausalLM"]),
    "no_bias_of_steps": (_forget_bias, ["GraniteMoeHybridForCausalLM", "Qwen3NextForCausalLM"]),
    "no_skip": (_forget_skip, ["GraniteMoeHybridForCausalLM"]),
}


@pytest.mark.parametrize(
    ("name", "architecture"), [(n, a) for n, (_, architectures) in MUTANTS.items() for a in architectures]
)
def test_a_mutant_shows(tmp_path, name, architecture):
    oracle = make_oracle(tiny_config(architecture))
    model = load(save(oracle, tmp_path))
    assert difference(oracle, model) <= TOLERANCE
    for layer in model.modules():
        if isinstance(layer, Recurrent):
            MUTANTS[name][0](layer)
    assert not difference(oracle, model) <= 1e-2


def test_the_gate_of_attention_shows(tmp_path):
    oracle = make_oracle(tiny_config("Qwen3_5ForCausalLM"))
    model = load(save(oracle, tmp_path))
    for layer in model.modules():
        if isinstance(layer, SelfAttention):
            layer._multiply = lambda x, gates, form: x
    assert difference(oracle, model) > 1e-2


@pytest.mark.parametrize("architecture", RECURRENT)
def test_company_changes_no_bit(tmp_path, architecture):
    model = load(save(make_oracle(tiny_config(architecture)), tmp_path))
    prompts = make_prompts(131)
    together = prompt_logits(model, prompts, 13)
    for prompt, logits in zip(prompts, together, strict=True):
        driver = Driver(model)
        request = driver.add()
        alone = [driver.step({request: prompt[i : i + 13]})[request] for i in range(0, len(prompt), 13)]
        assert torch.equal(torch.cat(alone), logits)


@pytest.mark.parametrize(
    ("architecture", "entries", "error", "text"),
    [
        (
            "Lfm2ForCausalLM",
            {"layer_types": ["conv", "sliding", "conv"]},
            Unsupported,
            "layer_types must name",
        ),
        ("Lfm2ForCausalLM", {"layer_types": ["conv"] * 2}, Unsupported, "for all 3 layers"),
        ("Lfm2ForCausalLM", {"conv_L_cache": 9}, BadCheckpoint, "takes 2 to 8 inputs; the config has 9"),
        (
            "Lfm2ForCausalLM",
            {"layer_types": None, "full_attn_idxs": 1},
            BadCheckpoint,
            "cannot be used",
        ),
        (
            "Qwen3NextForCausalLM",
            {"linear_num_key_heads": 3},
            BadCheckpoint,
            "4 recurrent heads cannot share",
        ),
        ("Qwen3NextForCausalLM", {"linear_key_head_dim": 24}, Unsupported, "by 16; this model has 24"),
        (
            "GraniteMoeHybridForCausalLM",
            {"mamba_n_heads": 5, "mamba_n_groups": 2},
            BadCheckpoint,
            "5 recurrent heads cannot",
        ),
    ],
)
def test_bad_configs(tmp_path, architecture, entries, error, text):
    folder = save(make_oracle(tiny_config(architecture)), tmp_path)
    with pytest.raises(error, match=text):
        load(edit_config(folder, **entries))
