"""Experts of quantized checkpoints: logits are those of the dequantized model, and of nothing near it."""

import json
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from octavo.base.errors import BadCheckpoint, Unsupported
from octavo.config.args import EngineArgs
from octavo.config.resolve import resolve
from octavo.runtime.distributed.context import ParallelContext
from octavo.runtime.layers.build import packed_matrices
from octavo.runtime.loader.loader import load_model
from octavo.runtime.models import gpt_oss
from octavo.runtime.platforms.platform import get_platform
from octavo.runtime.worker.memory_forecast import forecast
from tests import quantized_writers as writers
from tests.model_driver import engine_config, load, prompt_logits
from tests.parity.test_quantized_checkpoints import FORMATS, config_groups
from tests.parity.test_quantized_checkpoints import make as make_dense
from tests.tiny_models import edit_config, make_oracle, make_prompts, oracle_logits, save, tiny_config

SIZES = {
    "hidden_size": 64,
    "head_dim": 16,
    "moe_intermediate_size": 96,
    "intermediate_size": 96,
    "num_experts": 8,
}
EXPERT = re.compile(r"experts\.\d+\.((gate|up|down)_proj|w\d)\.weight$")
PROMPTS = make_prompts(131, (1, 23))


def distance(folder, oracle, model=None) -> float:
    pairs = zip(prompt_logits(model or load(folder), PROMPTS), PROMPTS, strict=True)
    return max(float((ours - oracle_logits(oracle, prompt)).abs().max()) for ours, prompt in pairs)


def make(tmp_path, config, writer, family="Qwen3MoeForCausalLM"):
    """A checkpoint with packed experts, and the model that it stands for."""
    folder = save(make_oracle(tiny_config(family) | SIZES), tmp_path / "packed")
    plain = load_file(folder / "model.safetensors")
    packed = dict(plain)
    for name in filter(EXPERT.search, plain):
        written = writer(packed.pop(name))
        plain[name] = written.matrix.float()
        stem = name.removesuffix("weight")
        packed |= {stem + suffix: x.contiguous() for suffix, x in written.tensors.items()}
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "config.json").write_text((folder / "config.json").read_text())
    save_file(plain, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    save_file(packed, folder / "model.safetensors", {"format": "pt"})
    names = ["re:.*self_attn.*", "re:.*mlp\\.gate$", "lm_head"]
    if config["quant_method"] == "compressed-tensors":
        config = config | {"ignore": names}
    elif config["quant_method"] == "gptq":
        config = config | {"dynamic": {r"-:.*self_attn.*": {}}}
    else:
        config = config | {"modules_to_not_convert": ["self_attn", "lm_head"]}
    oracle = AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", attn_implementation="eager", dtype=torch.float32
    ).eval()
    return edit_config(folder, quantization_config=config), oracle


NAMES = ["gptq-4-32", "gptq-8-32", "gptq-sym", "awq-32", "pack-4", "pack-8-channel", "int8-channel"]
NAMES += ["float-channel", "mxfp4", "fp8-tensor", "fp8-block", "pack-4-asymmetric"]


@pytest.mark.matrix(4)
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_dequantized_model(tmp_path, name):
    config, writer = FORMATS[name]
    if name == "pack-4-asymmetric":
        config = config_groups("pack-quantized", 4, "group", group_size=32, symmetric=False)
        writer = partial(writers.packed, group=32, symmetric=False)
    folder, oracle = make(tmp_path, config, writer)
    model = load(folder)
    assert distance(folder, oracle, model) < 1e-4
    assert any("8 experts of" in line for line in packed_matrices(model))
    path = folder / "model.safetensors"
    tensors = load_file(path)
    key = next(k for k in tensors if ".1.mlp.experts.3.down_proj" in k and tensors[k].element_size() < 8)
    key = key.rpartition(".")[0]
    stored = next(f"{key}.{s}" for s in ("qweight", "weight_packed", "weight") if f"{key}.{s}" in tensors)
    tensors[stored].view(torch.uint8).view(-1)[::2] ^= 68
    save_file(tensors, path, {"format": "pt"})
    assert distance(folder, oracle) > 1e-3


def test_other_names_of_experts(tmp_path):
    """Those of Mixtral."""
    folder, oracle = make(tmp_path, *FORMATS["gptq-4-32"], "MixtralForCausalLM")
    assert distance(folder, oracle) < 1e-4


def test_deepseek_in_fp8(tmp_path):
    """All matrices but the routers, those of latent attention, too."""
    config, writer = FORMATS["fp8-block"][0], partial(writers.fp8, n=32, k=32, name="weight_scale_inv")
    oracle = make_oracle(tiny_config("DeepseekV3ForCausalLM") | {"hidden_size": 64})
    folder = save(oracle, tmp_path / "packed")
    plain = load_file(folder / "model.safetensors")
    packed = dict(plain)
    for name in [name for name in plain if re.search(r"(proj|mqa|_b_proj)\.weight$", name)]:
        written = writer(packed.pop(name))
        plain[name] = written.matrix.float()
        stem = name.removesuffix("weight")
        packed |= {stem + suffix: x.contiguous() for suffix, x in written.tensors.items()}
    save_file(plain, folder / "model.safetensors", {"format": "pt"})
    oracle = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()
    save_file(packed, folder / "model.safetensors", {"format": "pt"})
    edit_config(folder, quantization_config=config | {"weight_block_size": [32, 32]})
    assert distance(folder, oracle) < 1e-4


def test_stacks_of_experts_in_fp8(tmp_path):
    """As transformers 5 keeps them in memory: one tensor, and one of scales, for all experts."""
    config, writer = FORMATS["fp8-block"][0], partial(writers.fp8, n=32, k=32, name="weight_scale_inv")
    folder, oracle = make(tmp_path, config | {"weight_block_size": [32, 32]}, writer)
    tensors = load_file(folder / "model.safetensors")
    for layer in range(3):
        base = f"model.layers.{layer}.mlp.experts"
        for suffix, ours in (("weight", ""), ("weight_scale_inv", "_scale_inv")):

            def take(expert, kind, base=base, suffix=suffix):
                return tensors.pop(f"{base}.{expert}.{kind}_proj.{suffix}")

            rows = [torch.cat([take(e, "gate"), take(e, "up")]) for e in range(8)]
            downs = [take(e, "down") for e in range(8)]
            tensors[f"{base}.gate_up_proj{ours}"] = torch.stack(rows)
            tensors[f"{base}.down_proj{ours}"] = torch.stack(downs)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert distance(folder, oracle) < 1e-4


@pytest.mark.matrix(4)
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("act-order", "desc_act"),
        ("lacks one", r"lacks 1 weights: layers\.1\.mlp\.experts\.down\.qweight:5"),
        ("rows", r"experts\.5\.up_proj\.scales.*expected shape"),
        ("NaN", r"layers\.1\.mlp\.experts\.down.*a scale is NaN"),
        ("mixed", "plain beside packed experts"),
    ],
)
def test_what_is_refused(tmp_path, change, text):
    folder, _ = make(tmp_path, *FORMATS["gptq-4-32"])
    tensors = load_file(folder / "model.safetensors")
    base = "model.layers.1.mlp.experts.5"
    if change == "act-order":
        for name in [name for name in tensors if name.endswith("g_idx")]:
            tensors[name] = tensors[name].flip(0).roll(3).contiguous()
    elif change == "lacks one":
        del tensors[f"{base}.down_proj.qweight"]
    elif change == "rows":
        tensors[f"{base}.up_proj.scales"] = torch.zeros(2, 95, dtype=torch.float16)
    elif change == "NaN":
        tensors[f"{base}.down_proj.scales"][0, 0] = float("nan")
    else:
        rules = {r"-:.*self_attn.*": {}, r"-:.*experts\.5\..*": {}}
        edit_config(folder, quantization_config=FORMATS["gptq-4-32"][0] | {"dynamic": rules})
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises((BadCheckpoint, Unsupported), match=text):
        load(folder)


def gpt_oss_folder(tmp_path, **own):
    """A checkpoint of gpt-oss as published: blocks [E, N, K / 32, 16] and scales [E, N, K / 32]."""
    oracle = make_oracle(tiny_config("GptOssForCausalLM") | SIZES | own)
    folder = save(oracle, tmp_path)
    tensors = {name: x.contiguous() for name, x in oracle.state_dict().items()}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        weight = tensors.pop(name)  # [E, K, N]
        written = [writers.mxfp4(matrix.t()) for matrix in weight]
        blocks = torch.stack([each.tensors["weight_packed"] for each in written])
        tensors[f"{name}_blocks"] = blocks.unflatten(-1, (-1, 16)).contiguous()
        tensors[f"{name}_scales"] = torch.stack([each.tensors["weight_scale"] for each in written])
        oracle.state_dict()[name].copy_(torch.stack([each.matrix.t() for each in written]))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return edit_config(folder, quantization_config={"quant_method": "mxfp4"}), oracle


def test_gpt_oss_as_published(tmp_path, monkeypatch):
    folder, oracle = gpt_oss_folder(tmp_path)
    model = load(folder)
    assert distance(folder, oracle, model) < 1e-4
    assert {line.partition(",")[0] for line in packed_matrices(model) if "experts" in line} == {
        "8 experts of MXFP4 96x64",
        "8 experts of MXFP4 64x96",
    }
    kept = sum(stack.blocks.nbytes for stack in model.layers[0].mlp.experts.method._stacks)
    assert kept == 8 * (96 * 2 * 64 + 64 * 96) * 17 // 32  # 4.25 bits a weight and nothing else
    for layer in model.layers:
        layer.attention.sinks.weight.fill_(float("-inf"))
    assert distance(folder, oracle, model) > 1e-2
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for twin in ("nibbles", "exponents", "pairs"):
        other = dict(tensors)
        for name in [name for name in tensors if name.endswith(("_blocks", "_scales"))]:
            if twin == "nibbles" and name.endswith("_blocks"):
                other[name] = tensors[name] << 4 | tensors[name] >> 4
            if twin == "exponents" and name.endswith("_scales"):
                other[name] = tensors[name] + 1
        if twin == "pairs":
            rules = gpt_oss.GptOss.WEIGHTS.rules
            stem = "layers.*.mlp.experts.gate_up_proj_bias"
            halves = rules[stem]._replace(transform=lambda x, layer: x.view(len(x) * 2, -1))
            monkeypatch.setattr(gpt_oss.GptOss, "WEIGHTS", gpt_oss.GptOss.WEIGHTS.replace({stem: halves}))
        save_file(other, path, {"format": "pt"})
        assert distance(folder, oracle) > 1e-2, twin


@pytest.mark.slow
def test_gpt_oss_on_triton(tmp_path):
    """Sinks, windows, the clamp and codes, by the kernels of a GPU in Triton's interpreter."""
    from octavo.runtime.kernels.triton.table import cuda_table
    from tests.triton_here import HAS_GPU

    if HAS_GPU:
        pytest.skip("there tests/gpu/test_models_on_gpu.py does it")
    folder, oracle = gpt_oss_folder(tmp_path)
    platform, table = get_platform("cpu", 1), cuda_table()
    platform.kernels = replace(platform.kernels, attention=table.attention, experts=table.experts)
    model = load_model(engine_config(folder), platform, ParallelContext())
    assert distance(folder, oracle, model) < 1e-4


@pytest.mark.parametrize("kind", ["gptq-4-32", "fp8-block", "int8-channel", "mxfp4", "gpt-oss", "dense"])
def test_what_a_plan_says_of_packed_weights(tmp_path, kind):
    """The forecast's bytes are those that the model takes."""
    if kind == "gpt-oss":
        folder, _ = gpt_oss_folder(tmp_path)
    elif kind == "dense":
        folder, _ = make_dense(tmp_path, *FORMATS["gptq-4-32"])
    else:
        folder, _ = make(tmp_path, *FORMATS[kind])
    config = resolve(EngineArgs(model=str(folder), dtype="float32", device="cpu", skip_tokenizer_init=True))
    assert forecast(config, 8 << 30).ready.weight_bytes == load(folder).weight_bytes


def test_random_weights_are_packed_as_stored_ones_are(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("GptOssForCausalLM") | sizes))
    model = load(tmp_path, load_format="dummy")
    assert any("MXFP4" in kind for kind in packed_matrices(model))
    for logits in prompt_logits(model, PROMPTS):
        assert logits.isfinite().all() and logits.std() > 0
