"""Quantized checkpoints: logits are those of the dequantized model, and of nothing near it."""

import json
import logging
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.base.errors import BadCheckpoint, ConfigError, Unsupported
from octavo.runtime.distributed.context import ParallelContext
from octavo.runtime.distributed.group import Group
from octavo.runtime.layers.build import named_parameters, packed_matrices
from octavo.runtime.quantization.packed_layout import groups_of, words
from octavo.runtime.quantization.parameter import Shard
from tests import quantized_writers as writers
from tests.model_driver import load, prompt_logits
from tests.tiny_models import edit_config, make_oracle, make_prompts, oracle_logits, save, tiny_config

SIZES = {"hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 6, "num_key_value_heads": 2}
PROMPTS = make_prompts(131, (1, 23))
EPS = torch.finfo(torch.float32).eps
ORDER = {k: torch.randperm(k, generator=torch.Generator().manual_seed(k)) for k in (192, 320, 96, 48)}


def by_size(writer, **options):
    """A writer whose act-order is that of the matrix's inputs."""
    return lambda weight: writer(weight, order=ORDER[weight.shape[1]], **options)


def config_groups(kind, bits, strategy, number="int", **more):
    weights = {"num_bits": bits, "type": number, "strategy": strategy, "symmetric": True} | more
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group}}


def quark(exclude, **weight):
    return {"quant_method": "quark", "global_quant_config": {"weight": weight}, "exclude": exclude}


def hqq(bits, group):
    weights = {"nbits": bits, "group_size": group, "axis": 1, "channel_wise": True, "view_as_float": False}
    return {
        "quant_method": "hqq",
        "quant_config": {"weight_quant_params": weights},
        "skip_modules": ["lm_head"],
    }


def torchao(name, **data):
    return {
        "quant_method": "torchao",
        "quant_type": {"default": {"_type": name, "_data": data, "_version": 2}},
    }


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}
FP8 = {"quant_method": "fp8"}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
FORMATS = {
    **{
        f"gptq-{bits}-{group}": (
            GPTQ | {"bits": bits, "group_size": group},
            partial(writers.gptq, bits=bits, group=group),
        )
        for bits, group in ((4, 32), (4, 64), (4, -1), (8, 32), (8, -1), (2, 64), (3, 32), (3, 64))
    },
    "gptq-sym": (GPTQ | {"sym": True}, partial(writers.gptq, symmetric=True)),
    "gptq-v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, partial(writers.gptq, version=2)),
    "gptq-act-order": (GPTQ | {"desc_act": True}, by_size(writers.gptq)),
    "gptq-float32-scales": (GPTQ, partial(writers.gptq, dtype=torch.float32)),
    "awq-32": ({"quant_method": "awq", "bits": 4, "group_size": 32}, writers.awq),
    "awq-64": ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, partial(writers.awq, group=64)),
    "auto-round": (
        {"quant_method": "auto-round", "bits": 4, "group_size": 32, "packing_format": "auto_round:auto_gptq"},
        writers.gptq,
    ),
    "auto-round-awq": (
        {"quant_method": "auto-round", "bits": 4, "group_size": 32, "packing_format": "auto_round:auto_awq"},
        writers.awq,
    ),
    "pack-4": (config_groups("pack-quantized", 4, "group", group_size=32), writers.packed),
    "pack-4-asymmetric": (
        config_groups("pack-quantized", 4, "group", group_size=64, symmetric=False),
        partial(writers.packed, group=64, symmetric=False),
    ),
    "pack-8-channel": (
        config_groups("pack-quantized", 8, "channel"),
        partial(writers.packed, bits=8, group=-1),
    ),
    "pack-act-order": (config_groups("pack-quantized", 4, "group", group_size=32), by_size(writers.packed)),
    "int8-channel": (
        config_groups("int-quantized", 8, "channel"),
        partial(writers.int8, dtype=torch.bfloat16),
    ),
    "int8-asymmetric": (
        config_groups("int-quantized", 8, "channel", symmetric=False),
        partial(writers.int8, zero=3, dtype=torch.float16),
    ),
    "int8-tensor": (config_groups("naive-quantized", 8, "tensor"), partial(writers.int8, n=0)),
    "int8-group": (config_groups("int-quantized", 8, "group", group_size=64), partial(writers.int8, k=64)),
    "float-tensor": (config_groups("float-quantized", 8, "tensor", "float"), partial(writers.fp8, n=0)),
    "float-channel": (config_groups("float-quantized", 8, "channel", "float"), writers.fp8),
    "float-block": (
        config_groups("float-quantized", 8, "block", "float", block_structure=[128, 128]),
        partial(writers.fp8, n=128, k=128),
    ),
    "mxfp4": (config_groups("mxfp4-pack-quantized", 4, "group", "float", group_size=32), writers.mxfp4),
    "mxfp8": (config_groups("mxfp8-quantized", 8, "group", "float", group_size=32), writers.mxfp8),
    "fp8-tensor": (FP8, partial(writers.fp8, n=0)),
    "fp8-block": (
        FP8 | {"weight_block_size": [128, 128]},
        partial(writers.fp8, n=128, k=128, name="weight_scale_inv"),
    ),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, writers.fp8),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, partial(writers.fp8, n=0)),
    "quark-int8": (
        {
            "quant_method": "quark",
            "global_quant_config": {"weight": {"dtype": "int8", "qscheme": "per_channel"}},
        }
        | {"exclude": ["lm_head"]},
        writers.int8,
    ),
    "quark-fp8": (
        {
            "quant_method": "quark",
            "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}},
        }
        | {"exclude": ["re:lm_.*"]},
        partial(writers.fp8, n=0),
    ),
    "nvfp4": (
        config_groups("nvfp4-pack-quantized", 4, "tensor_group", "float", group_size=16),
        writers.nvfp4,
    ),
    "modelopt-nvfp4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]},
        partial(writers.nvfp4, modelopt=True),
    ),
    **{
        f"hqq-{bits}-{group}": (hqq(bits, group), partial(writers.hqq, bits=bits, group=group))
        for bits, group in ((4, 64), (4, 32), (8, 64), (3, 64), (2, 64))
    },
    "torchao-int8": (torchao("Int8WeightOnlyConfig"), partial(writers.torchao, writer=writers.int8)),
    "torchao-group": (
        torchao("IntxWeightOnlyConfig", granularity={"_type": "PerGroup", "_data": {"group_size": 32}}),
        partial(writers.torchao, writer=partial(writers.int8, k=32)),
    ),
    "torchao-fp8": (
        torchao("Float8DynamicActivationFloat8WeightConfig", granularity=[{"_type": "PerRow"}] * 2),
        partial(writers.torchao, writer=writers.fp8),
    ),
    "torchao-int4": (
        torchao("Int4WeightOnlyConfig", group_size=32, int4_packing_format={"_data": "PLAIN"}),
        writers.torchao_int4,
    ),
    "nf4": (NF4, writers.bnb4),
    "nf4-nested": (NF4 | {"bnb_4bit_use_double_quant": True}, partial(writers.bnb4, nested=True)),
    "fp4": (NF4 | {"bnb_4bit_quant_type": "fp4"}, partial(writers.bnb4, kind="fp4")),
    "bnb-int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, writers.bnb8),
}


def make(tmp_path, config, writer, head=False, **model):
    oracle = make_oracle(tiny_config("LlamaForCausalLM") | SIZES | model)
    if config["quant_method"] == "compressed-tensors" and not head:
        config = config | {"ignore": ["lm_head"]}

    def choose(name):
        return writer if name != "lm_head" or head else None

    return writers.write_checkpoint(oracle, tmp_path / "folder", config, choose), oracle


def distance(folder, oracle, **options) -> float:
    """The largest error of logits, in units of √K eps |x||W| of the head: what rounding alone makes."""
    worst = 0.0
    for prompt, ours in zip(PROMPTS, prompt_logits(load(folder, **options), PROMPTS), strict=True):
        theirs = oracle_logits(oracle, prompt)
        worst = max(worst, float((ours - theirs).abs().max() / theirs.abs().max()))
    return worst / (EPS * SIZES["hidden_size"] ** 0.5)


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_dequantized_model(tmp_path, name):
    config, writer = FORMATS[name]
    folder, oracle = make(tmp_path, config, writer)
    assert distance(folder, oracle) < 4
    change(folder, "layers.1.mlp.down_proj", flip_a_bit)
    assert distance(folder, oracle) > 40


def change(folder, module, edit) -> None:
    """Edit a module's tensors."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit({name.rpartition(".")[2]: tensors for name in tensors if module in name}, tensors, module)
    save_file(tensors, path, {"format": "pt"})


def flip_a_bit(suffixes, tensors, module) -> None:
    """In the middle of the stored codes."""
    suffix = next(s for s in ("qweight", "weight_packed", "weight", "W_q", "_weight_qdata") if s in suffixes)
    codes = tensors[f"model.{module}.{suffix}"].view(torch.uint8).view(-1)
    codes[len(codes) // 2 + 1] ^= 4


def mixed(name):
    """q and k in 8 bits, v plain, the rest in 4; the head in 8."""
    if name.endswith("v_proj") or "layers.2.mlp" in name:
        return None
    return partial(writers.gptq, bits=8 if name.endswith(("q_proj", "k_proj", "lm_head")) else 4)


RULES = {
    r"+:.*\.(q|k)_proj": {"bits": 8},
    r"-:.*\.v_proj": {},
    r"-:.*layers\.2\.mlp": {},
    "lm_head": {"bits": 8},
}


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM"])
def test_parts_of_one_projection_may_differ(tmp_path, architecture):
    """By GPTQ's rules per module; Qwen2 has biases, and a tied head, which stays plain."""
    is_tied = architecture == "Qwen2ForCausalLM"
    oracle = make_oracle(tiny_config(architecture) | SIZES)
    config = GPTQ | {"dynamic": RULES, "lm_head": True}
    choose = (lambda name: None if name == "lm_head" else mixed(name)) if is_tied else mixed
    folder = writers.write_checkpoint(oracle, tmp_path / "folder", config, choose)
    assert distance(folder, oracle) < 4
    types = {segment.type_name for segment in load(folder).layers[0].attention.qkv.method._segments}
    assert types == {"U8_32", "F32"}


@pytest.mark.matrix(6)
@pytest.mark.parametrize("sizes", [{"hidden_size": 48}, {"hidden_size": 96, "intermediate_size": 80}])
@pytest.mark.parametrize("name", ["gptq", "pack", "int8", "fp8"])
def test_sizes_that_no_block_divides(tmp_path, sizes, name):
    config, writer = {
        "gptq": (GPTQ | {"group_size": 16, "desc_act": True}, by_size(writers.gptq, group=16)),
        "pack": (config_groups("pack-quantized", 4, "channel"), partial(writers.packed, group=-1)),
        "int8": FORMATS["int8-channel"],
        "fp8": (FORMATS["fp8-block"][0], FORMATS["fp8-block"][1]),
    }[name]
    ORDER[80] = torch.randperm(80, generator=torch.Generator().manual_seed(80))
    model = SIZES | sizes | {"num_attention_heads": 6, "num_key_value_heads": 2}
    folder, oracle = make(tmp_path, config, writer, **model)
    assert distance(folder, oracle) < 6


def test_a_quantized_head(tmp_path):
    """of 131 outputs, and every linear layer by name"""
    config = config_groups("pack-quantized", 4, "group", group_size=32)
    config["config_groups"]["group_0"]["targets"] = ["re:.*proj", "lm_head"]
    folder, oracle = make(tmp_path, config, writers.packed, head=True)
    assert distance(folder, oracle) < 4
    assert load(folder).lm_head.method._whole.type_name == "U4_32"


TWINS = {
    "zero without -1": ("gptq-4-32", "v2"),
    "g_idx ignored": ("gptq-act-order", "g_idx"),
    "AWQ's order linear": ("awq-32", "awq"),
    "one scale for q, k and v": ("fp8-tensor", "one scale"),
    "e8m0 off by one": ("mxfp4", "e8m0"),
    "NVFP4's number inverted": ("nvfp4", "inverse"),
    "HQQ's halves swapped": ("hqq-4-64", "hqq"),
    "TorchAO's halves swapped": ("torchao-int4", "high first"),
}


@pytest.mark.matrix(6)
@pytest.mark.parametrize("twin", TWINS)
def test_one_broken_rule_shows(tmp_path, twin):
    name, how = TWINS[twin]
    config, writer = FORMATS[name]
    config = config | {"checkpoint_format": "gptq_v2"} if how == "v2" else config
    if how == "awq":
        writer = partial(writers.awq, columns=range(8))
    if how == "hqq":
        writer = partial(writers.hqq, order=(0, 1))
    if how == "high first":
        writer = partial(writers.torchao_int4, high_first=True)
    if how == "e8m0":
        writer = partial(writers.mxfp4, shift=1)
    folder, oracle = make(tmp_path, config, writer)
    if how == "g_idx":
        edit_all(folder, "g_idx", lambda tensor: torch.arange(len(tensor), dtype=torch.int32) // 32)
    if how == "inverse":
        edit_all(folder, "down_proj.weight_global_scale", lambda tensor: 1 / tensor)
    if how == "one scale":
        largest = {}
        edit_all(folder, "q_proj.weight_scale", lambda tensor: largest.setdefault("q", tensor) * 1.0)
        edit_all(folder, "k_proj.weight_scale", lambda tensor: largest["q"].clone())
    assert distance(folder, oracle) > 1000


def edit_all(folder, suffix, edit) -> None:
    path = folder / "model.safetensors"
    tensors = {name: edit(t) if name.endswith(suffix) else t for name, t in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.matrix(6)
@pytest.mark.parametrize(
    "name",
    [
        "gptq-act-order",
        "gptq-8-32",
        "awq-64",
        "pack-4-asymmetric",
        "float-block",
        "nf4-nested",
        "torchao-int4",
    ],
)
def test_ranks_keep_their_part(tmp_path, name):
    """Two ranks' outputs side by side, their inputs' products added up: the whole matrix."""
    config, writer = FORMATS[name]
    sizes = {"intermediate_size": 384} if "nf4" in name else {}
    ORDER[384] = torch.randperm(384, generator=torch.Generator().manual_seed(384))
    folder, _ = make(tmp_path, config, writer, **sizes)
    whole, *ranks = (load(folder, parallel) for parallel in (ParallelContext(), *TWO))
    columns, rows = ([model.layers[1].mlp.up.method for model in (whole, *ranks)], [])
    x = torch.randn(3, SIZES["hidden_size"])
    parts = [method.apply(x, None).chunk(2, 1) for method in columns[1:]]
    together = torch.cat([torch.cat([part[i] for part in parts], 1) for i in range(2)], 1)
    torch.testing.assert_close(together, columns[0].apply(x, None), atol=1e-5, rtol=0)
    rows = [model.layers[1].mlp.down.method for model in (whole, *ranks)]
    x = torch.randn(3, sizes.get("intermediate_size", SIZES["intermediate_size"]))
    summed = sum(
        method.apply(part.contiguous(), None) for method, part in zip(rows[1:], x.chunk(2, 1), strict=True)
    )
    torch.testing.assert_close(summed, rows[0].apply(x, None), atol=1e-5, rtol=0)


TWO = [ParallelContext(Group(rank, 2)) for rank in range(2)]


def test_a_rank_cannot_cut_a_word():
    """But what it keeps of groups are those that it touches."""
    assert words(4).cut(Shard("q", 48, 24, 24)) == Shard("q", 6, 3, 3)
    assert words(3).cut(Shard("q", 96, 32, 64)) == Shard("q", 9, 3, 6)
    assert groups_of(32).cut(Shard("q", 96, 48, 48)) == Shard("q", 3, 1, 2)
    with pytest.raises(ConfigError, match=r"8 weights are stored in a word: 12 to 24 of 36 cannot be"):
        words(4).cut(Shard("q", 36, 12, 12))


def refusal(folder, **options) -> str:
    with pytest.raises((BadCheckpoint, Unsupported)) as caught:
        load(folder, **options)
    return str(caught.value)


DOWN = "model.layers.1.mlp.down_proj"
FAULTS = {
    "truncated qzeros": (
        lambda tensors: tensors.update({f"{DOWN}.qzeros": tensors[f"{DOWN}.qzeros"][:-1].clone()}),
        "down_proj.qzeros': expected shape [10, 24], found [9, 24]",
    ),
    "g_idx out of range": (
        lambda tensors: tensors[f"{DOWN}.g_idx"].fill_(10),
        "layer layers.1.mlp.down: g_idx has groups beyond the 10 of scales",
    ),
    "a NaN scale": (
        lambda tensors: tensors[f"{DOWN}.scales"][0].fill_(float("nan")),
        "layer layers.1.mlp.down: a scale is NaN or infinite",
    ),
    "a missing tensor": (
        lambda tensors: tensors.pop(f"{DOWN}.scales"),
        "lacks 1 weights: layers.1.mlp.down.scales",
    ),
    "a plain tensor": (
        lambda tensors: tensors.update({f"{DOWN}.weight": torch.zeros(192, 320)}),
        "has no place in this LlamaForCausalLM, whose config says that it is stored by 'gptq'",
    ),
    "words as floats": (
        lambda tensors: tensors.update({f"{DOWN}.qweight": tensors[f"{DOWN}.qweight"].float()}),
        "down_proj.qweight' is torch.float32; only int32 can be read",
    ),
}


@pytest.mark.matrix(6)
@pytest.mark.parametrize("fault", FAULTS)
def test_damaged_tensors_are_named(tmp_path, fault):
    edit, message = FAULTS[fault]
    folder, _ = make(tmp_path, *FORMATS["gptq-4-32"])
    change(folder, DOWN, lambda suffixes, tensors, module: edit(tensors))
    assert message in refusal(folder)


CONFIGS = {
    "5 bits": ({"bits": 5}, "Unsupported quantization config: bits=5 of GPTQ. Allowed: 2, 3, 4, 8."),
    "no bits": ({"bits": None}, "bits must be an integer, found None"),
    "a group that does not divide": (
        {"group_size": 128},
        "layer layers.0.attention.qkv:q: group_size=128 does not",
    ),
    "a rule": ({"dynamic": {"+:(": {}}}, "'(' is no regex"),
    "another method": (
        {"quant_method": "magic"},
        "The weights are stored by 'magic', which does not fit auto-round, awq,",
    ),
}


@pytest.mark.matrix(6)
@pytest.mark.parametrize("fault", CONFIGS)
def test_configs_that_cannot_be(tmp_path, fault):
    entries, message = CONFIGS[fault]
    folder, _ = make(tmp_path, *FORMATS["gptq-4-32"])
    edit_config(folder, quantization_config=GPTQ | entries)
    assert message in refusal(folder)


def test_two_blocks_that_disagree(tmp_path):
    folder, _ = make(tmp_path, *FORMATS["gptq-4-32"])
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    assert "two quantization blocks disagree: 'gptq' in config.json's quantization_config and" in refusal(
        folder
    )


def test_methods_by_name(tmp_path):
    """As vLLM calls them: the checkpoint's own, or an error."""
    folder, oracle = make(tmp_path, *FORMATS["gptq-4-32"])
    for name in ("gptq", "gptq_marlin", "auto_gptq"):
        assert distance(folder, oracle, quantization=name) < 4
    assert "(gptq) does not match the quantization method specified in" in refusal(folder, quantization="awq")
    assert "Unknown quantization method: q9" in refusal(folder, quantization="q9")
    assert "quantization='humming': octavo chooses its kernels" in refusal(folder, quantization="humming")


def test_no_wide_copy_is_kept(tmp_path):
    """What a rank counts as its weights is the file's size, within a tenth."""
    folder, _ = make(tmp_path, *FORMATS["gptq-4-32"], hidden_size=384, intermediate_size=1280)
    model, size = load(folder, dtype="bfloat16"), (folder / "model.safetensors").stat().st_size
    plain = sum(p.num_bytes for n, p in named_parameters(model).items() if n.startswith(("embed", "lm_head")))
    assert model.weight_bytes - plain < 1.1 * (size - 2 * plain)


ONLINE = {
    **dict.fromkeys(("fp8", "fp8_per_tensor"), partial(writers.fp8, n=0)),
    "fp8_per_channel": writers.fp8,
    "fp8_per_block": partial(writers.fp8, n=128, k=128),
    "mxfp8": writers.mxfp8,
    "int4_32": writers.awq,
    "int4_64": partial(writers.awq, group=64),
}


@pytest.mark.matrix(6)
@pytest.mark.parametrize("name", ONLINE)
def test_plain_weights_rounded_while_loading(tmp_path, name):
    """The head stays as it is; two other roundings of the same bits are further away."""
    oracle = make_oracle(tiny_config("LlamaForCausalLM") | SIZES)
    folder = save(oracle, tmp_path / "plain")
    writer = ONLINE[name]
    writers.write_checkpoint(oracle, tmp_path / "other", {}, lambda n: None if n == "lm_head" else writer)
    assert distance(folder, oracle, quantization=name) < 40
    assert distance(folder, oracle) > 4000
    other = "int4_32" if name == "int4_64" else "fp8_per_channel" if name != "fp8_per_channel" else "mxfp8"
    assert distance(folder, oracle, quantization=other) > 4000


def test_what_runs_is_told(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)
    caplog.set_level(logging.INFO, logger="octavo")
    folder, _ = make(tmp_path, *FORMATS["gptq-4-32"])
    packed = packed_matrices(load(folder, activations="int16"))
    assert packed["U4_32 192x320, inputs int16"] == 3 and packed["F32 131x192, inputs float32"] == 2
    assert "Weights stored by gptq are multiplied as " in caplog.text
    assert "3 x U4_32 192x320, inputs int16" in caplog.text
