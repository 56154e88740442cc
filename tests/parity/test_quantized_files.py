"""`octavo quantize` writes files that octavo and the gguf package read alike; rounding by GGUF's types."""

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers

from octavo.base.errors import ConfigError
from octavo.base.gguf import open_gguf
from octavo.cli.main import main
from octavo.frontend.text.loader import load_tokenizer
from octavo.runtime.layers.build import packed_matrices
from octavo.runtime.quantization.k_quants import ROUND, quantize
from tests.gguf_models import read_gguf
from tests.model_driver import load, prompt_logits
from tests.parity.test_packed_experts import gpt_oss_folder
from tests.tiny_models import make_oracle, make_prompts, oracle_logits, save, tiny_config

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"head_dim": 64, "vocab_size": 300, "num_hidden_layers": 4}
PROMPTS = make_prompts(300, (1, 23))


def write_tokenizer(folder) -> None:
    """Byte-level BPE as Llama 3 cuts words, of 256 bytes, some merges and a special token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n")]
    names = [*letters, *("".join(pair) for pair in merges)]
    backend = tokenizers.Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, merges))
    words = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken("<end>")])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<end>", "chat_template": "{{ messages }}"}')


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A folder with a tokenizer."""
    oracle = make_oracle(tiny_config("LlamaForCausalLM") | SIZES)
    folder = save(oracle, tmp_path_factory.mktemp("plain") / "model")
    write_tokenizer(folder)
    return folder, oracle


def distance(model, oracle) -> float:
    """The largest error of logits, relative to the largest."""
    made = zip(PROMPTS, prompt_logits(model, PROMPTS), strict=True)
    return max(
        float((ours - oracle_logits(oracle, p)).abs().max() / oracle_logits(oracle, p).abs().max())
        for p, ours in made
    )


@pytest.mark.parametrize("recipe", ["Q8_0", "Q4_K_M", "F16"])
def test_a_gguf_file_is_what_the_package_reads(plain, tmp_path, capsys, recipe):
    """Its dequantized weights, permuted back, make the model that octavo runs from the file."""
    folder, oracle = plain
    out = tmp_path / "model.gguf"
    assert main(["quantize", str(folder), str(out), "--to", f"gguf:{recipe}"]) == 0
    before = distance(load(out), oracle)
    assert before < {"Q8_0": 0.1, "Q4_K_M": 0.9, "F16": 5e-3}[recipe]
    other = make_oracle(tiny_config("LlamaForCausalLM") | SIZES)
    read_gguf(other, out)
    assert distance(load(out), other) < 1e-5 < before
    types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(out).tensors}
    assert types["blk.0.attn_norm.weight"] == "F32"
    if recipe == "Q4_K_M":
        assert types["blk.1.attn_q.weight"] == "Q4_K" and types["token_embd.weight"] == "Q4_K"
        assert types["output.weight"] == "Q6_K" and types["blk.3.ffn_down.weight"] == "Q6_K"
        assert types["blk.0.attn_v.weight"] == "Q4_K" and types["blk.2.attn_v.weight"] == "Q6_K"
        assert "matrices Q4_K" in capsys.readouterr().out


def test_the_tokenizer_comes_along(plain, tmp_path):
    folder, _ = plain
    out = tmp_path / "model.gguf"
    main(["quantize", str(folder), str(out), "--to", "gguf:Q4_0"])
    ours, theirs = load_tokenizer(out), load_tokenizer(folder)
    for text in ("in the end<end>", "it's 12345\n\n  the 的", "the"):
        assert ours.encode(text) == theirs.encode(text)
    assert ours.eos_token == "<end>" and ours.chat_template == "{{ messages }}"
    metadata = open_gguf(out).metadata
    assert metadata["tokenizer.ggml.pre"] in ("llama-bpe", "llama3")
    assert metadata["tokenizer.ggml.tokens"][-1] == "[PAD299]" and metadata["general.file_type"] == 2


def test_a_gguf_file_is_rounded_again(plain, tmp_path):
    """Metadata and all: from F16, as from the folder."""
    folder, _ = plain
    wide, direct, again = (tmp_path / name for name in ("wide.gguf", "direct.gguf", "again.gguf"))
    main(["quantize", str(folder), str(wide), "--to", "gguf:F16"])
    main(["quantize", str(folder), str(direct), "--to", "gguf:Q8_0"])
    main(["quantize", str(wide), str(again), "--to", "gguf:Q8_0"])
    first, second = open_gguf(direct), open_gguf(again)
    assert first.metadata | {"general.name": 0} == second.metadata | {"general.name": 0}
    first = open_gguf(direct)
    for name in first.tensors:
        other = first.data(name) != open_gguf(again).data(name)
        assert other.mean() < 0.05, name  # float16 moves some codes
        first = open_gguf(direct)


EXPERTS = {
    "num_attention_heads": 4,
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "vocab_size": 300,
}
LATENT = {"kv_lora_rank": 64, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
LATENT |= {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 0.7}}
LATENT["rope_parameters"] |= {"mscale_all_dim": 0.7, "original_max_position_embeddings": 64}
UNTRUNCATED = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "truncate": False}
UNTRUNCATED |= {"original_max_position_embeddings": 64}
WITH_EXPERTS = {
    "Qwen3MoeForCausalLM": {},
    "MixtralForCausalLM": {"sliding_window": None, "num_hidden_layers": 8},
    "DeepseekV2ForCausalLM": LATENT,
    "DeepseekV3ForCausalLM": LATENT | {"n_group": 2, "topk_group": 1, "norm_topk_prob": False},
    "GptOssForCausalLM": {"rope_parameters": UNTRUNCATED, "swiglu_limit": 7.0},
}


@pytest.mark.parametrize("architecture", WITH_EXPERTS)
def test_experts_become_stacks(tmp_path, architecture):
    """The `gguf` package finds each where it belongs, and of its numbers makes the model that octavo runs."""
    config = tiny_config(architecture) | EXPERTS | WITH_EXPERTS[architecture]
    oracle, other = make_oracle(config), make_oracle(config, seed=1)
    folder = save(oracle, tmp_path / "model")
    write_tokenizer(folder)
    for recipe, most in (("F16", 1e-3), ("Q4_K_M", 0.1)):
        out = tmp_path / f"{recipe}.gguf"
        assert main(["quantize", str(folder), str(out), "--to", f"gguf:{recipe}"]) == 0
        read_gguf(other, out)
        for name, parameter in other.state_dict().items():
            assert (parameter - oracle.state_dict()[name]).norm() < most * parameter.norm(), name
        assert distance(load(out), other) < 1e-4
    tensors = {t.name: t for t in gguf.GGUFReader(out).tensors}
    stacks = {name: t for name, t in tensors.items() if name.endswith("_exps.weight")}
    assert {tuple(t.shape) for t in stacks.values()} == {(256, 256, 8)}
    assert {t.tensor_type.name for t in stacks.values()} == {"Q4_K", "Q6_K"}
    assert tensors["blk.2.ffn_gate_inp.weight"].tensor_type.name == "F32"
    if architecture == "MixtralForCausalLM":
        types = [tensors[f"blk.1.attn_{name}.weight"].tensor_type.name for name in ("q", "k", "v", "output")]
        assert types[1:3] == ["Q8_0", "Q8_0"] and types[0] != types[3]


def test_gpt_oss_keeps_its_blocks(tmp_path):
    """MXFP4 as published, and again from the file, whatever the recipe: bytes, and what they are worth."""
    own = WITH_EXPERTS["GptOssForCausalLM"] | {"vocab_size": 300}
    folder, oracle = gpt_oss_folder(tmp_path / "model", **own)
    write_tokenizer(folder)
    first, again = tmp_path / "first.gguf", tmp_path / "again.gguf"
    for source, out, recipe in ((folder, first, "F16"), (first, again, "Q8_0")):
        assert main(["quantize", str(source), str(out), "--to", f"gguf:{recipe}"]) == 0
        kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(out).tensors}
        assert kinds["blk.0.ffn_up_exps.weight"] == "MXFP4" and kinds["blk.0.attn_q.weight"] == recipe
        assert distance(load(out), oracle) < {"F16": 5e-3, "Q8_0": 0.2}[recipe]
    for name in kinds:
        if "_exps.weight" in name:
            assert (open_gguf(first).data(name) == open_gguf(again).data(name)).all()


UNSAID = {
    "mlp.router": ("Qwen3MoeForCausalLM", {"norm_topk_prob": False}),
    "mlp.num_experts": ("Qwen3MoeForCausalLM", {"mlp_only_layers": [1]}),
    "mlp.limit": ("GptOssForCausalLM", {"swiglu_limit": 3.0}),
    "sliding_window": ("GptOssForCausalLM", {"layer_types": ["full_attention"] * 3, "swiglu_limit": 7.0}),
    "rope": ("DeepseekV2ForCausalLM", {}),
}


@pytest.mark.parametrize("field", UNSAID)
def test_what_a_file_cannot_say_is_refused(tmp_path, capsys, field):
    """It would be another model."""
    architecture, change = UNSAID[field]
    folder = save(make_oracle(tiny_config(architecture) | {"vocab_size": 300} | change), tmp_path / "model")
    write_tokenizer(folder)
    assert main(["quantize", str(folder), str(tmp_path / "x.gguf"), "--to", "gguf:F16"]) == 2
    message = capsys.readouterr().err
    assert "cannot say" in message and field in message
    assert not list(tmp_path.glob("x.gguf*"))


def test_a_missing_expert_is_named(tmp_path, capsys):
    folder = save(make_oracle(tiny_config("Qwen3MoeForCausalLM") | EXPERTS), tmp_path / "model")
    write_tokenizer(folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.5.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert main(["quantize", str(folder), str(tmp_path / "x.gguf"), "--to", "gguf:F16"]) == 2
    assert "lacks parts of blk.1.ffn_up_exps.weight: 5" in capsys.readouterr().err


@pytest.mark.parametrize("target", ["compressed-tensors:W4A16", "fp8"])
def test_a_folder_for_other_servers(plain, tmp_path, target):
    """The codes times their scales are the model that octavo runs; a head and norms stay."""
    folder, oracle = plain
    out = tmp_path / "model"
    assert main(["quantize", str(folder), str(out), "--to", target]) == 0
    tensors = {}
    for path in sorted(out.glob("*.safetensors")):
        tensors |= load_file(path)
    state = oracle.state_dict()
    other = make_oracle(tiny_config("LlamaForCausalLM") | SIZES)
    for name in list(state):
        stem = name.removesuffix(".weight")
        if f"{stem}.weight_scale" not in tensors:
            assert torch.equal(tensors[name], state[name])
            continue
        scale = tensors[f"{stem}.weight_scale"].float()
        if target == "fp8":
            made = tensors[name].float() * scale
        else:
            words = tensors[f"{stem}.weight_packed"][..., None] >> torch.arange(0, 32, 4) & 15
            made = (words.flatten(1) - 8.0) * scale.repeat_interleave(128, 1)
        assert (made - state[name]).norm() / state[name].norm() < (0.04 if target == "fp8" else 0.15)
        other.get_parameter(name).data.copy_(made)
    assert distance(load(out), other) < 1e-5 < distance(load(out), oracle)
    assert (out / "tokenizer.json").is_file()


def test_bad_input(plain, tmp_path, capsys):
    folder, _ = plain
    packed = tmp_path / "packed"
    main(["quantize", str(folder), str(packed), "--to", "fp8"])
    cases = {
        (str(folder), str(packed), "fp8"): "is there already",
        (str(packed), str(tmp_path / "x"), "fp8"): "only folders of plain safetensors",
        (str(packed), str(tmp_path / "x.gguf"), "gguf:Q8_0"): "only plain weights",
    }
    for (source, out, target), message in cases.items():
        assert main(["quantize", source, out, "--to", target]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "x").exists() and not list(tmp_path.glob("x.gguf*"))


@pytest.mark.parametrize("name", sorted(ROUND))
def test_blocks_are_the_nearest_that_a_type_has(name):
    """The package unpacks them alike; one changed byte shows; constants and zeros are exact enough."""
    torch.manual_seed(0)
    matrix = torch.randn(40, 512) * 0.05
    matrix[3], matrix[4], matrix[5] = 0, 0.02, -0.01
    blocks = quantize(matrix, name)
    theirs = gguf.quants.dequantize(blocks.data.numpy(), gguf.GGMLQuantizationType[name])
    made = torch.from_numpy(np.array(theirs))
    most = {"Q8_0": 0.006, "Q4_0": 0.1, "Q5_0": 0.05, "Q4_K": 0.08, "Q5_K": 0.04, "Q6_K": 0.02}[name]
    assert (made - matrix).norm() / matrix.norm() < most
    assert not made[3].any() and (made[4] - 0.02).abs().max() < 1e-3 * 2
    worse = blocks.data.clone()
    worse[:, -40:] ^= 0x44
    other = gguf.quants.dequantize(worse.numpy(), gguf.GGMLQuantizationType[name])
    assert np.abs(other - matrix.numpy()).max() > 3 * (made - matrix).abs().max()


def test_types_by_kind_of_layer(plain):
    folder, oracle = plain
    for name in ("q4_k", "q6_k"):
        counts = packed_matrices(load(folder, quantization=name))
        assert any(line.startswith(f"{name.upper()} 512x256") for line in counts), counts
    targets = {"re:.*layers\\.1\\..*": "q8_0", "re:.*(q|k)_proj": "fp8_per_channel"}
    given = {"targets": targets, "ignore": ["model.layers.3"]}
    model = load(folder, quantization="online", quantization_config=given)
    kinds = [segment.type_name for segment in model.layers[0].attention.qkv.method._segments]
    assert kinds == ["F8_64", "F32"]
    assert model.layers[1].mlp.down.method._whole.type_name == "Q8_0"
    assert not any(part.type_name != "F32" for part in model.layers[3].attention.qkv.method._segments)
    given = {"linear": "fp8_per_channel", "ignore": ["re:.*down_proj"]}
    model = load(folder, quantization_config=given)
    assert model.layers[2].mlp.up.method._whole.type_name == "F8_64"
    assert model.layers[2].mlp.down.method._whole.type_name == "F32"
    assert 0 < distance(model, oracle) < 0.5


WRONG = {
    "targets, or linear and moe, not both": {"targets": {"a": "q4_k"}, "linear": "q4_k"},
    r"\['q9'\] must be of": {"linear": "q9"},
    r"has no \['liner'\]": {"liner": "q4_k"},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_rules(plain, message):
    with pytest.raises(ConfigError, match=message):
        load(plain[0], quantization="online", quantization_config=WRONG[message])
