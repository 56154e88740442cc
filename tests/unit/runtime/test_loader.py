"""Damaged, incomplete and hostile checkpoints are refused, by the name of the file and tensor at fault."""

import io
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from octavo.base.errors import BadCheckpoint, ConfigError, Unsupported
from octavo.runtime.distributed.context import ParallelContext
from octavo.runtime.distributed.group import Group
from octavo.runtime.layers.build import named_parameters
from octavo.runtime.loader import safetensors
from tests.gguf_models import write_gguf
from tests.model_driver import engine_config, load, prompt_logits
from tests.tiny_models import make_oracle, make_prompts, save, tiny_config

TENSOR = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def folder(tmp_path) -> Path:
    """A good tiny Llama to be damaged."""
    return save(make_oracle(tiny_config("LlamaForCausalLM")), tmp_path)


def change(folder: Path, edit) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, {"format": "pt"})


def refusal(folder: Path, kind=BadCheckpoint, **options) -> str:
    with pytest.raises(kind) as caught:
        load(folder, **options)
    return str(caught.value)


def test_a_bar_shows_how_far_loading_has_come(folder, monkeypatch):
    """On a terminal, and once loading has taken a second."""
    bars = []

    def watched(pieces, *words, **options):
        bars.append(
            bar := tqdm(pieces, *words, file=io.StringIO(), **options | {"delay": 0, "disable": False})
        )
        assert options["delay"] == 1.0 and options["disable"] is None
        return bar

    monkeypatch.setattr("octavo.runtime.loader.loader.tqdm", watched)
    load(folder)
    assert bars[0].n == bars[0].total > 20


def test_a_missing_tensor(folder):
    change(folder, lambda tensors: tensors.pop(TENSOR))
    assert "lacks 1 weights: layers.1.mlp.down.weight" in refusal(folder)


def test_a_missing_part_of_a_merged_weight(folder):
    change(folder, lambda tensors: tensors.pop("model.layers.0.self_attn.k_proj.weight"))
    assert "lacks 1 weights: layers.0.attention.qkv.weight:k" in refusal(folder)


def test_a_tensor_too_many(folder):
    change(folder, lambda tensors: tensors.update({"model.surprise.weight": torch.zeros(2)}))
    assert "model.safetensors: tensor 'model.surprise.weight' is not known to Llama" in refusal(folder)


def test_a_layer_too_many(folder):
    change(folder, lambda tensors: tensors.update({"model.layers.3.input_layernorm.weight": torch.zeros(48)}))
    message = refusal(folder)
    assert "tensor 'model.layers.3.input_layernorm.weight' has no place in this LlamaForCausalLM" in message


def test_a_wrong_shape(folder):
    change(folder, lambda tensors: tensors.update({TENSOR: torch.zeros(48, 95)}))
    assert refusal(folder).endswith(f"tensor {TENSOR!r}: expected shape [48, 96], found [48, 95]")


def test_a_wrong_type(folder):
    change(folder, lambda tensors: tensors.update({TENSOR: torch.zeros(48, 96, dtype=torch.int8)}))
    assert f"tensor {TENSOR!r} is torch.int8; float32, bfloat16 and float16 can be read" in refusal(folder)


def test_harmless_tensors_are_left_out(folder):
    change(
        folder,
        lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}),
    )
    load(folder)


def test_a_tied_head_in_the_file_is_not_used(tmp_path):
    oracle = make_oracle(tiny_config("LlamaForCausalLM") | {"tie_word_embeddings": True})
    folder = save(oracle, tmp_path)
    prompt = make_prompts(131, (5,))
    expected = prompt_logits(load(folder), prompt)[0]
    change(folder, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(131, 48)}))
    assert torch.equal(prompt_logits(load(folder), prompt)[0], expected)


@pytest.mark.parametrize("size", [0, 7, 100, -1], ids=["empty", "no_header", "cut_header", "cut_data"])
def test_a_truncated_file(folder, size):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    assert f"{path} cannot be read" in refusal(folder)


@pytest.fixture
def sharded(tmp_path) -> Path:
    return save(make_oracle(tiny_config("LlamaForCausalLM")), tmp_path, max_shard_size="100KB")


def edit_index(folder: Path, edit) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    edit(index["weight_map"])
    path.write_text(json.dumps(index))


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "weights.bin"])
def test_an_index_that_leaves_the_folder(sharded, file):
    edit_index(sharded, lambda weight_map: weight_map.update({TENSOR: file}))
    assert f"tensor {TENSOR!r} is said to be in {file!r}, not a safetensors file of the folder" in refusal(
        sharded
    )


def test_an_index_that_names_an_absent_file(sharded):
    edit_index(sharded, lambda weight_map: weight_map.update({TENSOR: "absent.safetensors"}))
    assert "names files that are not there" in refusal(sharded)


def test_an_index_that_names_an_absent_tensor(sharded):
    other = next(path.name for path in sorted(sharded.glob("*.safetensors")))
    edit_index(sharded, lambda weight_map: weight_map.update({"model.absent.weight": other}))
    assert "tensor 'model.absent.weight' is announced by" in refusal(sharded)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("", "cannot be read as JSON"),
        ("[]", "must hold a JSON object, found list"),
        ("{}", "holds no weight_map"),
        ('{"weight_map": 3}', "holds no weight_map"),
    ],
)
def test_an_index_that_is_none(sharded, content, fault):
    (sharded / "model.safetensors.index.json").write_text(content)
    assert fault in refusal(sharded)


def test_several_files_without_an_index(sharded):
    (sharded / "model.safetensors.index.json").unlink()
    load(sharded)
    first = next(iter(sorted(sharded.glob("*.safetensors"))))
    (sharded / "copy.safetensors").write_bytes(first.read_bytes())
    assert "the same weight was loaded before" in refusal(sharded)


def test_a_quantized_checkpoint_without_a_scheme(folder):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "aqlm"}
    (folder / "config.json").write_text(json.dumps(config))
    assert "stored by 'aqlm'" in refusal(folder, Unsupported)


def test_dummy_weights(tmp_path):
    """Small, from the seed, the same whatever the number of ranks; GPT-2 has every kind of parameter."""
    config = tiny_config("GPT2LMHeadModel")
    (tmp_path / "config.json").write_text(json.dumps(config))
    prompt = make_prompts(131, (5,))
    one, again, other = (
        prompt_logits(load(tmp_path, load_format="dummy", seed=seed), prompt)[0] for seed in (0, 0, 1)
    )
    assert torch.equal(one, again)
    assert not torch.equal(one, other)

    whole = load(tmp_path, load_format="dummy")
    half = load(tmp_path, ParallelContext(Group(1, 2)), load_format="dummy")
    name = "layers.0.mlp.up.weight"
    expected = named_parameters(whole)[name].data
    assert torch.equal(named_parameters(half)[name].data, expected[expected.shape[0] // 2 :])
    assert 0.0009 < expected.abs().max() <= 0.001
    assert (
        half.weight_bytes < whole.weight_bytes == sum(p.data.nbytes for p in named_parameters(whole).values())
    )


def test_heads_that_ranks_cannot_share(folder):
    with pytest.raises(ConfigError, match=r"heads \(6\) must be divisible by tensor parallel size \(4\)"):
        load(folder, ParallelContext(Group(0, 4)))


def test_a_gguf_file_with_an_unknown_tensor(tmp_path):
    path = write_gguf(make_oracle(tiny_config("LlamaForCausalLM")), tmp_path / "m.gguf", {})
    path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_down.weight", b"blk.1.ffn_dawn.weight"))
    assert f"{path}: tensor 'blk.1.ffn_dawn.weight' is not known to LlamaForCausalLM" in refusal(path)


def test_a_gguf_file_with_a_gate_too_many(tmp_path):
    path = write_gguf(make_oracle(tiny_config("GPT2LMHeadModel")), tmp_path / "m.gguf", {})
    path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_down.weight", b"blk.1.ffn_gate.weight"))
    assert "tensor 'blk.1.ffn_gate.weight': this model has no 'gate' beside ['up']" in refusal(path)


def test_a_rank_reads_its_own_experts_only(tmp_path):
    """Expert parallelism: whole experts of this rank are kept, others' tensors are not even offered."""
    config = tiny_config("Qwen3MoeForCausalLM")
    folder, count = save(make_oracle(config), tmp_path / "moe"), config["num_experts"]
    two = Group(1, 2)
    model = load(folder, ParallelContext(two, ep=two))
    whole = load(folder)
    stacks = [m.layers[0].mlp.experts for m in (model, whole)]
    assert stacks[0].own == range(count // 2, count)
    kept, all_ = (dict(s.parameters_by_name)["up.weight"].layout.shape for s in stacks)
    assert kept == (all_[0] // 2, *all_[1:])
    pieces = safetensors.read(engine_config(folder), model, None)
    experts = [piece.shard for piece in pieces if ".experts." in piece.parameter and piece.shard]
    assert experts
    assert {int(shard.partition(".")[0]) for shard in experts} == set(range(count // 2, count))
    with pytest.raises(ConfigError, match=f"3 ranks cannot have equal numbers of {count} experts"):
        load(folder, ParallelContext(ep=Group(0, 3)))
