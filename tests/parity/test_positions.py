"""What positions, norms behind ropes and learned slopes do shows: without each, logits are wrong."""

import pytest

from octavo.base.errors import BadCheckpoint, Unsupported
from octavo.runtime.layers.attention import Attention
from octavo.runtime.layers.mlp import XIELU
from octavo.runtime.layers.self_attention import SelfAttention
from tests.model_driver import load, prompt_logits
from tests.tiny_models import edit_config, make_oracle, make_prompts, oracle_logits, save, tiny_config

TOLERANCE = 1e-4


def difference(oracle, model) -> float:
    """The largest difference of logits of a prompt over three chunks of Llama 4's."""
    (prompt,) = make_prompts(131, (90,))
    (logits,) = prompt_logits(model, [prompt], 37)
    return float((logits - oracle_logits(oracle, prompt)).abs().max())


def _see_other_chunks(model):
    for layer in _all(model, Attention):
        layer._chunk = 0


def _forget_positions(model):
    for layer in _all(model, SelfAttention):
        layer._factors = None


def _normalise_first(model):
    for layer in _all(model, SelfAttention):
        layer._fused_norms = layer._fused_norms._replace(follows_rotation=False)


def _level_slopes(model):
    for layer in _all(model, XIELU):
        layer._learned[1].zero_()


def _all(model, kind):
    return [module for module in model.modules() if isinstance(module, kind)]


MUTANTS = {
    "chunks": (_see_other_chunks, "Llama4ForCausalLM"),
    "positions": (_forget_positions, "Llama4ForCausalLM"),
    "positions_behind_a_rope": (_forget_positions, "Ministral3ForCausalLM"),
    "order_of_norm_and_rope": (_normalise_first, "HunYuanDenseV1ForCausalLM"),
    "slopes": (_level_slopes, "ApertusForCausalLM"),
}


@pytest.mark.parametrize(("mutate", "architecture"), MUTANTS.values(), ids=MUTANTS)
def test_a_mutant_shows(tmp_path, mutate, architecture):
    oracle = make_oracle(tiny_config(architecture))
    model = load(save(oracle, tmp_path))
    assert difference(oracle, model) <= TOLERANCE
    mutate(model)
    assert difference(oracle, model) > 1e-2


def test_every_factor_of_falcon_h1_shows(tmp_path):
    config = tiny_config("FalconH1ForCausalLM")
    oracle = make_oracle(config)
    folder = save(oracle, tmp_path)
    assert difference(oracle, load(folder)) <= TOLERANCE
    for name, value in config.items():
        if "multiplier" not in name:
            continue
        for place in range(len(value)) if isinstance(value, list) else [None]:
            other = (
                [2 * x if i == place else x for i, x in enumerate(value)] if place is not None else 2 * value
            )
            assert difference(oracle, load(edit_config(folder, **{name: other}))) > 1e-3, (name, place)
        edit_config(folder, **{name: value})


@pytest.mark.parametrize(
    ("architecture", "entries", "error", "text"),
    [
        ("FalconH1ForCausalLM", {"ssm_multipliers": [1.0]}, BadCheckpoint, "must be 5 numbers"),
        ("FalconH1ForCausalLM", {"projectors_bias": True}, Unsupported, "projectors_bias=True"),
        ("HunYuanMoEV1ForCausalLM", {"moe_topk": [1, 2, 1]}, Unsupported, "the same in all layers"),
        ("HunYuanMoEV1ForCausalLM", {"moe_topk": 9}, BadCheckpoint, "more than the 8 experts"),
        ("Llama4ForCausalLM", {"attention_chunk_size": 30}, Unsupported, "a block_size that divides them"),
    ],
)
def test_bad_configs(tmp_path, architecture, entries, error, text):
    folder = save(make_oracle(tiny_config(architecture)), tmp_path)
    with pytest.raises(error, match=text):
        prompt_logits(load(edit_config(folder, **entries)), make_prompts(131, (4,)))
