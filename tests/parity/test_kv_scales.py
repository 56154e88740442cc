"""Scales of keys and values: from a checkpoint, without effect in a wide cache, needed by a narrow one."""

from dataclasses import replace
from math import inf, log2

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.base.errors import BadCheckpoint
from octavo.runtime.distributed.context import ParallelContext
from octavo.runtime.kernels.attention import HeadInputs, Ragged, Scores
from octavo.runtime.kernels.ref.table import ref_table
from octavo.runtime.layers.attention import Attention
from octavo.runtime.loader.kv_scales import read_kv_scales
from octavo.runtime.loader.loader import load_model
from octavo.runtime.platforms.cpu import CPUPlatform
from octavo.runtime.worker.kv_scale_run import measure_kv_scales, power_of_two
from tests.model_driver import engine_config, load, prompt_logits
from tests.tiny_models import make_oracle, make_prompts, save, tiny_config

PROMPTS = make_prompts(131, (1, 23))
NAMES = {
    "model.layers.0.self_attn.k_scale": (0, 0.5),
    "model.layers.0.self_attn.attn.v_scale": (0, 2.0),
    "model.layers.1.self_attn.k_proj.k_scale": (1, 0.25),
    "model.layers.1.self_attn.v_proj.output_scale": (1, 3.0),
    "model.layers.2.self_attn.kv_scale": (2, 0.125),
}


def logits(model):
    return torch.cat([part.flatten() for part in prompt_logits(model, PROMPTS)])


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma2ForCausalLM"])
def test_what_is_divided_is_multiplied_again(tmp_path, architecture):
    """With norms of heads, soft caps and windows; one factor alone changes everything."""
    folder = save(make_oracle(tiny_config(architecture)), tmp_path / "model")
    expected, model = logits(load(folder)), load(folder)
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    for index, layer in enumerate(layers):
        layer.use_kv_scales(0.25 * (index + 1), 7.0)
    made = logits(model)
    assert (made - expected).abs().max() < 1e-4 * expected.abs().max()
    layers[0]._kv_scales = (1.0, 7.0)
    assert (logits(model) - expected).abs().max() > 1e-2 * expected.abs().max()


def ref_platform():
    """A CPU without kernels of its own, which has FP8 caches."""
    platform = CPUPlatform(torch.device("cpu"), 1)
    platform.kernels = ref_table()
    return platform


def narrow(config):
    """The same with a cache in FP8."""
    cache = replace(config.cache, kv_cache_dtype="float8_e4m3fn")
    return replace(config, cache=cache, scheduler=replace(config.scheduler, max_num_batched_tokens=64))


def with_scales(folder, scales):
    path = folder / "model.safetensors"
    save_file(load_file(path) | scales, path, {"format": "pt"})


def test_names(tmp_path):
    folder = save(make_oracle(tiny_config("LlamaForCausalLM")), tmp_path / "model")
    assert read_kv_scales(folder) == {}
    with_scales(folder, {name: torch.tensor(value) for name, (_, value) in NAMES.items()})
    assert read_kv_scales(folder) == {0: (0.5, 2.0), 1: (0.25, 3.0), 2: (0.125, 0.125)}
    with_scales(folder, {"model.layers.0.self_attn.k_scale": torch.tensor([0.5, 0.75])})
    assert read_kv_scales(folder)[0] == (0.75, 2.0)


@pytest.mark.parametrize("value", [float("nan"), 0.0, -1.0, float("inf")])
def test_no_scale(tmp_path, value):
    folder = save(make_oracle(tiny_config("LlamaForCausalLM")), tmp_path / "model")
    with_scales(folder, {"model.layers.1.self_attn.v_scale": torch.tensor([value])})
    with pytest.raises(
        BadCheckpoint, match=r"layers\.1\.self_attn\.v_scale'?: a scale of keys or values must"
    ):
        read_kv_scales(folder)


def test_scales_are_measured_where_a_file_has_none(tmp_path):
    """Only where e4m3 needs them, as powers of two; then a narrow cache gives nearly the exact logits."""
    oracle = make_oracle(tiny_config("LlamaForCausalLM"))
    for layer, size in zip(oracle.model.layers, (1.0, 2.0**12, 2.0**-12), strict=False):
        attention = layer.self_attn
        attention.v_proj.weight.data *= size
        attention.o_proj.weight.data /= size
    folder = save(oracle, tmp_path / "model")
    exact = logits(load(folder))
    config = narrow(engine_config(folder))
    plain = load_model(config, ref_platform(), ParallelContext())
    scaled = load_model(config, ref_platform(), ParallelContext())
    measure_kv_scales(scaled, config, ref_platform())
    layers = [module for module in scaled.modules() if isinstance(module, Attention)]
    values = [1.0 if layer._kv_scales is None else layer._kv_scales[1] for layer in layers]
    assert values[0] == 1 < 2**4 <= values[1] and values[2] <= 2**-12
    assert all(log2(value).is_integer() for value in values)
    errors = [float((logits(model) - exact).norm() / exact.norm()) for model in (scaled, plain)]
    assert errors[0] < 0.1 < 0.3 < errors[1]


def test_weights_made_up_are_not_measured(tmp_path):
    folder = save(make_oracle(tiny_config("LlamaForCausalLM")), tmp_path / "model")
    config = narrow(engine_config(folder, load_format="dummy"))
    model = load_model(config, ref_platform(), ParallelContext())
    measure_kv_scales(model, config, ref_platform())
    assert not any(module.has_kv_scales for module in model.modules() if isinstance(module, Attention))


@pytest.mark.parametrize(
    ("largest", "scale"), [(1.0, 1), (224.0, 1), (225.0, 2), (900.0, 8), (0.5, 2**-8), (0.0, 1), (inf, 1)]
)
def test_powers_of_two(largest, scale):
    assert power_of_two(largest) == scale
    assert not 1 < largest < inf or largest / scale <= 224


@pytest.mark.parametrize("size", [4000.0, 2e-3])
def test_values_beyond_fp8_need_them(size):
    """They saturate, or vanish, in a cache of E4M3 without a scale."""
    torch.manual_seed(0)
    q, k, v = torch.randn(9, 4, 64), torch.randn(9, 2, 64), torch.randn(9, 2, 64) * size
    table, batch = torch.arange(3, dtype=torch.int32)[None], Ragged(
        cu_q_lens=torch.tensor([0, 9], dtype=torch.int32), kv_lens=torch.tensor([9], dtype=torch.int32)
    )  # fmt: skip

    def seen(dtype, scale):
        cache, kernels = torch.zeros(3, 2, 4, 2, 64, dtype=dtype), ref_table().attention
        kernels.store_kv(HeadInputs(q, k, v / scale), cache, torch.arange(9))
        return kernels.paged_attention(q, cache, table, batch, Scores(0.125)) * scale

    exact, plain, scaled = (
        seen(dtype, scale)
        for dtype, scale in (
            (torch.float32, 1.0),
            (torch.float8_e4m3fn, 1.0),
            (torch.float8_e4m3fn, size / 50),
        )
    )
    assert (scaled - exact).norm() < 0.05 * exact.norm() < 0.15 * exact.norm() < (plain - exact).norm()
